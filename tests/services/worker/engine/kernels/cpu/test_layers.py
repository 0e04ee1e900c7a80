"""Layers in one call: what the operators give one by one, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from services.worker.engine import decoder_weights
from services.worker.engine.kernels.cpu import layers as native_layers
from services.worker.engine.kernels.cpu.onednn import find_block_functions
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, save_family

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from services.worker.engine.kernels.cpu.layers import FusedLayers
    from services.worker.engine.kernels.cpu.library import CpuLibrary

# New tokens of three rows in successive passes: prompts, decoding beside the rest of a prompt, decoding.
COUNTS = ((1, 30, 61), (1, 1, 25), (1, 1, 1))
WORK = [[random_ids(count, VOCABULARY, seed=count) for count in counts] for counts in COUNTS]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, library: CpuLibrary) -> list[FusedLayers | None]:
    """What models are given from now on; needs a compiler."""
    found = []

    def join(*arguments: object) -> FusedLayers | None:
        found.append(native_layers.fuse_layers(*arguments))  # type: ignore[arg-type]  # passed on
        return found[-1]

    monkeypatch.setattr(decoder_weights, "fuse_layers", join)
    return found


def outcomes(directory: Path, products: str = "auto", **changes: object) -> list[torch.Tensor]:
    """Logits of the passes in `WORK`."""
    runner = load(directory, backend="compiled", threads=2, products=products, **changes)  # type: ignore[arg-type]
    driver = Driver(runner)
    rows = [driver.open(100) for _ in WORK[0]]
    got = [driver.run(list(zip(rows, tokens, strict=True))) for tokens in WORK]
    runner.close()
    return got


def one_by_one(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(decoder_weights, "fuse_layers", lambda *_: None)
        return run()


@pytest.mark.parametrize("family", ["llama biased", "qwen3", "qwen2 windowed", "smol"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fused_layers_give_the_same_as_separate_operators(
    family: str, dtype: str, joined: list[FusedLayers | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_family(tmp_path, family)
    changes = {"dtype": dtype, "kv_dtype": "bfloat16" if family == "smol" else "auto"}
    got = outcomes(tmp_path, **changes)
    assert joined[-1] is not None
    expected = one_by_one(monkeypatch, lambda: outcomes(tmp_path, **changes))
    for these, those in zip(got, expected, strict=True):
        assert torch.equal(these, those)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_layers_give_the_same_with_products_of_onednn(
    dtype: str, library: CpuLibrary, joined: list[FusedLayers | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocks = find_block_functions()
    if blocks is None or not library.has_blocks(blocks, getattr(torch, dtype)):
        pytest.skip(f"oneDNN has no products of {dtype} here")
    save_family(tmp_path, "qwen3")
    got = outcomes(tmp_path, dtype=dtype, products="onednn")
    assert joined[-1] is not None
    expected = one_by_one(monkeypatch, lambda: outcomes(tmp_path, dtype=dtype, products="onednn"))
    others = outcomes(tmp_path, dtype=dtype, products="own")
    for these, those, near in zip(got, expected, others, strict=True):
        assert torch.equal(these, those)
        torch.testing.assert_close(these, near, atol=1e-2 if dtype == "bfloat16" else 1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("products", ["own", "onednn"])
def test_a_row_has_the_same_bits_in_chunks_in_steps_and_beside_others(
    products: str, dtype: str, library: CpuLibrary, tmp_path: Path
) -> None:
    blocks = find_block_functions()
    if products == "onednn" and (blocks is None or not library.has_blocks(blocks, getattr(torch, dtype))):
        pytest.skip(f"oneDNN has no products of {dtype} here")
    save_family(tmp_path, "qwen3")
    runner = load(tmp_path, backend="compiled", threads=2, products=products, dtype=dtype)
    driver, ids = Driver(runner), random_ids(100, VOCABULARY, seed=1)
    whole, stepped, beside, other = (driver.open(100) for _ in range(4))
    expected = driver.run([(whole, ids)])[-1]
    driver.run([(stepped, ids[:70])])
    for token in ids[70:]:
        got = driver.run([(stepped, [token])])
    assert torch.equal(got[-1], expected)
    driver.run([(beside, ids[:99]), (other, ids[:17])])
    together = driver.run([(beside, ids[99:]), (other, ids[17:60])])
    assert torch.equal(together[0], expected)
    runner.close()


def test_the_capacity_names_the_products(library: CpuLibrary, tmp_path: Path) -> None:
    assert library is not None
    save_family(tmp_path, "llama")
    for backend, products in (("compiled", "own"), ("torch", "")):
        runner = load(tmp_path, backend=backend)
        assert runner.capacity.products == products
        runner.close()


@pytest.mark.parametrize("family", ["gemma3", "qwen3 moe"])
def test_layers_of_another_kind_stay_apart(family: str, joined: list[FusedLayers | None], tmp_path: Path) -> None:
    load(save_family(tmp_path, family), backend="compiled").close()
    assert joined == [None]


def test_plain_torch_is_left_as_it_is(joined: list[FusedLayers | None], tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    load(tmp_path, backend="torch").close()
    assert joined == [None]


def test_fused_layers_give_the_same_for_a_long_prompt_on_two_threads(
    joined: list[FusedLayers | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_family(tmp_path, "llama")

    def run() -> list[torch.Tensor]:
        runner = load(tmp_path, backend="compiled", threads=2, dtype="bfloat16")
        driver = Driver(runner)
        got = driver.run([(driver.open(400), random_ids(400, VOCABULARY, seed=1))])
        runner.close()
        return [got]

    (got,), (expected,) = run(), one_by_one(monkeypatch, run)
    assert joined[0] is not None
    assert torch.equal(got, expected)
