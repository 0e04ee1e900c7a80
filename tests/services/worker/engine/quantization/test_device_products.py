"""Models with quantised weights on a GPU, against the same values that are multiplied in a wider type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.driving import Driver, load
from tests.services.worker.engine.execution.test_families import OWN, PROMPT
from tests.services.worker.engine.families import FAMILIES, reference_logits, save_model
from tests.services.worker.engine.quantization.fp8_checkpoints import change_config
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, store_quantised
from tests.services.worker.engine.quantization.test_stored_formats import SHAPE

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def can_multiply() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply FP8")


def logits_of(directory: Path, tokens: int | None = None, **changes: object) -> torch.Tensor:
    """Return the logits of a prompt, computed in passes of `tokens` tokens."""
    runner = load(directory, **changes)  # type: ignore[arg-type]  # whatever a test wants to change
    driver = Driver(runner)
    row, size = driver.open(len(PROMPT)), tokens or len(PROMPT)
    passes = [PROMPT[start : start + size] for start in range(0, len(PROMPT), size)]
    logits = torch.cat([driver.run([(row, ids)], all_tokens=True).cpu() for ids in passes])
    runner.close()
    return logits


@pytest.mark.parametrize("family", ["yarn", "gemma3", "qwen3 moe"])
def test_logits_are_those_of_widened_products_but_for_rounding(family: str, tmp_path: Path) -> None:
    name, options = FAMILIES[family]
    save_model(tmp_path, name, {**options, **OWN[family], "initializer_range": 0.05})
    got = logits_of(tmp_path, backend="gpu", dtype="bfloat16", quantization="fp8")
    widened = logits_of(tmp_path, backend="torch", dtype="bfloat16", quantization="fp8")
    wide = reference_logits(tmp_path, PROMPT)
    lost = float((widened - wide).norm() / wide.norm())
    # Roundings to bfloat16 differ, and with them a few of those to FP8.
    assert float((got - wide).norm() / wide.norm()) < 1.3 * lost + 0.03
    assert float((got - widened).norm() / wide.norm()) < lost + 0.03


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_of_stored_formats_are_those_of_the_reference(scheme: str, tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", {**FAMILIES["llama biased"][1], **SHAPE})
    wide = logits_of(tmp_path, backend="torch", dtype="float32")
    store_quantised(tmp_path, SCHEMES[scheme])
    expected = logits_of(tmp_path, backend="torch", dtype="float32")
    lost = float((expected - wide).norm() / wide.norm())
    for tokens in (None, 1):
        got = logits_of(tmp_path, backend="gpu", dtype="bfloat16", tokens=tokens)
        assert float((got.float() - expected).norm() / expected.norm()) < 0.7 * lost + 0.02


@pytest.mark.parametrize("scheme", ["fp8 blocks", "fp8 static", "int8", "awq 32", "gptq act-order"])
def test_experts_in_stored_formats_are_those_of_the_reference(scheme: str, tmp_path: Path) -> None:
    name, options = FAMILIES["qwen3 moe"]
    save_model(tmp_path, name, {**options, **SHAPE, "moe_intermediate_size": 128, "num_experts": 6})
    store_quantised(tmp_path, SCHEMES[scheme])
    # All of them are chosen: roundings change no choice.
    change_config(tmp_path, num_experts_per_tok=6)
    expected = logits_of(tmp_path, backend="torch", dtype="float32")
    for tokens in (None, 1):
        got = logits_of(tmp_path, backend="gpu", dtype="bfloat16", tokens=tokens)
        assert float((got.float() - expected).norm() / expected.norm()) < 0.1


def capacity(quantization: str, pages: int | None) -> tuple[int, int, int]:
    """Return pages, bytes of a page, and bytes that are taken beside pages."""
    torch.cuda.empty_cache()
    spec = EngineSpec("deploy/evaluation/shapes/qwen3-0.6b", load_format="dummy", max_rows=4, max_context=512,
                      max_step_tokens=256, quantization=quantization, device_pages=pages)  # fmt: skip
    runner = load_decoder(spec, lambda *_: None, RunnerOptions(device="cuda", backend="gpu"))
    made = runner.capacity
    page_bytes = made.kv_bytes_per_token * made.page_size
    taken = torch.cuda.memory_allocated() - (made.device_pages + 1) * page_bytes
    runner.close()
    return made.device_pages, page_bytes, taken


def test_memory_saved_by_smaller_weights_is_used_for_pages() -> None:
    (_, page_bytes, wide_bytes), (_, _, narrow_bytes) = capacity("auto", 8), capacity("fp8", 8)
    # 440 million weights of projections; embedding and head keep their type. Seen: 410 MB; the rest is not explained.
    assert 0.9 * 440e6 < wide_bytes - narrow_bytes < 1.05 * 440e6
    (wide, _, _), (narrow, _, _) = capacity("auto", None), capacity("fp8", None)
    assert (narrow - wide) * page_bytes > 0.8 * (wide_bytes - narrow_bytes)


def test_keys_and_values_in_fp8_with_measured_scales_change_logits_little(tmp_path: Path) -> None:
    name, options = FAMILIES["yarn"]
    save_model(tmp_path, name, {**options, **OWN["yarn"], "initializer_range": 0.1})
    wide = logits_of(tmp_path, backend="gpu", dtype="bfloat16")
    narrow = logits_of(tmp_path, 20, backend="gpu", dtype="bfloat16", kv_dtype="fp8")
    assert 0 < float((narrow - wide).norm() / wide.norm()) < 0.1
