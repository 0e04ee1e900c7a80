"""Models whose matrices are in FP8."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import linear

from common.errors import ConfigurationError
from services.worker.engine.quantization.checkpoint_scheme import stored_format
from services.worker.engine.quantization.formats import Fp8Format, StoredScales
from services.worker.engine.quantization.fp8 import quantise, quantise_rows
from services.worker.engine.quantization.policy import check_device
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, reference_logits, save_family, save_model
from tests.services.worker.engine.quantization.fp8_bounds import widened
from tests.services.worker.engine.quantization.fp8_checkpoints import (
    FP8_DYNAMIC,
    PER_TENSOR,
    change_config,
    changed,
    store_in_fp8,
)
from tests.services.worker.engine.quantization.stored_formats import FP8_STATIC

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

PER_CHANNEL = Fp8Format(StoredScales.CHANNEL)
PROMPT = random_ids(70, VOCABULARY)
# Weights small enough that roundings do not decide.
MILD = {"initializer_range": 0.05}


def save_mild(directory: Path, family: str, **options: object) -> Path:
    name, own = FAMILIES[family]
    return save_model(directory, name, {**own, **MILD, **options})


FLOAT8_KV = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mild(tmp_path_factory.mktemp("llama"), "llama")


def logits_of(directory: Path, **changes: object) -> torch.Tensor:
    runner = load(directory, **changes)  # type: ignore[arg-type]  # whatever a test wants to change
    driver = Driver(runner)
    logits = driver.run([(driver.open(len(PROMPT)), PROMPT)], all_tokens=True)
    runner.close()
    return logits


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def quantised_reference(
    directory: Path, monkeypatch: pytest.MonkeyPatch, shares: Mapping[int, list[int]] | None = None
) -> torch.Tensor:
    """Return what `transformers` computes if its projections quantise weights and activations.

    Inputs as wide as `shares` says are cut in such parts, each scaled by itself.
    """

    def forward(self: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        if self.weight.shape[0] == VOCABULARY:
            return linear(inputs, self.weight)
        parts = torch.split(inputs, (shares or {}).get(inputs.shape[-1], inputs.shape[-1]), dim=-1)
        quantised = [quantise_rows(part.flatten(0, -2)) for part in parts]
        seen = torch.cat([values.float() * scales for values, scales in quantised], dim=-1).view_as(inputs)
        return linear(seen, widened(quantise(self.weight)), self.bias)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Linear, "forward", forward)
        return reference_logits(directory, PROMPT)


def assert_equal_but_for_ties(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Now and then a value is rounded the other way; then this token, and who attends to it, get a little else."""
    exact = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)) < 1e-4
    assert exact.double().mean() > 0.2
    assert error(got, expected) < 0.02


@pytest.mark.parametrize("family", ["llama", "llama biased", "qwen3", "gemma3", "glm"])
def test_logits_are_those_of_quantised_projections(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mild(tmp_path, family)
    expected = quantised_reference(tmp_path, monkeypatch)
    wide = reference_logits(tmp_path, PROMPT)
    for backend in ("torch", "compiled"):
        got = logits_of(tmp_path, backend=backend, quantization="fp8")
        assert_equal_but_for_ties(got, expected)
        assert 0.005 < error(got, wide) < 0.2


@pytest.mark.parametrize("family", ["qwen3 moe", "qwen3 moe partly dense"])
def test_experts_are_quantised_too(family: str, tmp_path: Path) -> None:
    save_mild(tmp_path, family)
    # Other experts may be chosen: a few tokens differ more.
    got, wide = logits_of(tmp_path, quantization="fp8"), reference_logits(tmp_path, PROMPT)
    each = (got - wide).norm(dim=-1) / wide.norm(dim=-1)
    assert 0.005 < float(each.median()) < 0.1


def test_rows_get_the_same_bits_alone_in_chunks_and_in_a_batch_of_16(model: Path) -> None:
    driver = Driver(load(model, backend="compiled", threads=2, quantization="fp8", max_rows=16, device_pages=256))
    prompts = [[*PROMPT[:32], *random_ids(1 + 3 * i, VOCABULARY, seed=i)] for i in range(16)]
    alone = [driver.run([(driver.open(96), prompt)])[0] for prompt in prompts]
    first = driver.open(96)
    driver.run([(first, PROMPT[:9])])
    driver.run([(first, PROMPT[9:32])])
    rows = [driver.open(96) for _ in prompts]
    for row in rows:
        row.pages[:2] = first.pages[:2]
        row.computed = PROMPT[:32]
    driver.run([(row, prompt[32:-1]) for row, prompt in zip(rows[1:], prompts[1:], strict=True)])
    together = driver.run([(row, prompt[-1:]) for row, prompt in zip(rows, prompts, strict=True)])
    assert torch.equal(together, torch.stack(alone))


def compute_as_rank(rank: int, world_size: int, rendezvous: str, model: str, quantization: str) -> torch.Tensor:
    return logits_of(model, rank=rank, world_size=world_size, rendezvous=rendezvous, quantization=quantization)  # type: ignore[arg-type]  # a path as a string, which processes take


def test_two_ranks_hold_the_same_fp8_weights_and_scale_their_shares_of_activations(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mild(tmp_path, "llama")
    together = ranks.run(compute_as_rank, 2, str(tmp_path), "fp8")[0]
    # Of what the second product of a pair takes, 4 heads or 80 columns, each rank scales its own part.
    expected = quantised_reference(tmp_path, monkeypatch, {64: [32, 32], 80: [48, 32]})
    assert_equal_but_for_ties(together, expected)
    wide, alone = reference_logits(tmp_path, PROMPT), logits_of(tmp_path, quantization="fp8")
    assert error(together, alone) < error(alone, wide)
    store_in_fp8(tmp_path)
    torch.testing.assert_close(ranks.run(compute_as_rank, 2, str(tmp_path), "auto")[0], together)


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_weights_stored_in_fp8_are_not_quantised_again(backend: str, tmp_path: Path) -> None:
    save_mild(tmp_path, "qwen3")
    quantised = logits_of(tmp_path, backend=backend, quantization="fp8")
    store_in_fp8(tmp_path)
    stored = logits_of(tmp_path, backend=backend)
    assert torch.equal(stored, quantised)
    assert torch.equal(logits_of(tmp_path, backend=backend, quantization="fp8"), quantised)


def test_stored_experts_and_scales_of_whole_tensors_are_read(tmp_path: Path) -> None:
    save_mild(tmp_path / "experts", "qwen3 moe")
    quantised = logits_of(tmp_path / "experts", quantization="fp8")
    store_in_fp8(tmp_path / "experts")
    assert torch.equal(logits_of(tmp_path / "experts"), quantised)
    wide = reference_logits(save_mild(tmp_path / "tensors", "llama"), PROMPT)
    store_in_fp8(tmp_path / "tensors", PER_TENSOR)
    assert 0.005 < error(logits_of(tmp_path / "tensors"), wide) < 0.1


def test_layers_that_were_left_out_stay_wide(tmp_path: Path) -> None:
    save_mild(tmp_path, "llama")
    quantised = logits_of(tmp_path, quantization="fp8")
    store_in_fp8(tmp_path, but=("layers.0.", "mlp", "o_proj"))
    wide = reference_logits(save_mild(tmp_path / "wide", "llama"), PROMPT)
    assert 0 < error(logits_of(tmp_path), wide) < error(quantised, wide)


def test_dummy_weights_are_quantised_like_those_of_a_checkpoint(model: Path, tmp_path: Path) -> None:
    quantised = logits_of(model, load_format="dummy", quantization="fp8")
    wide = logits_of(model, load_format="dummy")
    assert 0 < error(quantised, wide) < 0.1
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    change_config(tmp_path, quantization_config=FP8_DYNAMIC)
    assert torch.equal(logits_of(tmp_path, load_format="dummy"), quantised)
    change_config(tmp_path, quantization_config=FP8_STATIC)
    static = logits_of(tmp_path, load_format="dummy")
    assert 0 < error(static, quantised) < 0.2


def test_scales_of_keys_and_values_do_not_change_the_format_of_weights() -> None:
    for strategy in ("tensor", "attn_head"):
        scheme = {**PER_TENSOR, "kv_cache_scheme": {**FLOAT8_KV, "strategy": strategy}}
        assert stored_format(scheme) == stored_format(PER_TENSOR)


def test_pages_of_fp8_and_of_wider_weights_are_not_interchangeable(model: Path) -> None:
    prints = {load(model, quantization=name).capacity.fingerprint for name in ("auto", "fp8")}
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("scheme", "complaint"),
    [
        ({"quant_method": "quip", "bits": 2}, "weights quantised by 'quip' are not supported"),
        ({**PER_TENSOR, "activation_scheme": "log"}, "activations scaled by 'log' numbers are not supported"),
        ({**PER_TENSOR, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**PER_TENSOR, "kv_cache_scheme": {**FLOAT8_KV, "type": "int"}}, "kv_cache_scheme: .*'int', 8, 'tensor'"),
        ({**PER_TENSOR, "kv_cache_scheme": {**FLOAT8_KV, "strategy": "channel"}}, "kv_cache_scheme: .*'channel'"),
        ({**PER_TENSOR, "kv_cache_scheme": {**FLOAT8_KV, "symmetric": False}}, "kv_cache_scheme: .* zero points"),
        ({**FP8_DYNAMIC, "format": "nvfp4-pack-quantized"}, "weights stored as 'nvfp4-pack-quantized' are not"),
        ({**FP8_DYNAMIC, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
        ({**FP8_DYNAMIC, "config_groups": {}}, "0 different schemes"),
        (changed(FP8_DYNAMIC, "weights", num_bits=4, type="int"), "weights of 4 bits, 'int', are not supported"),
        (changed(FP8_DYNAMIC, "weights", strategy="tensor_group"), "a scale for each 'tensor_group' are not"),
        (changed(FP8_DYNAMIC, "weights", symmetric=False), "zero points are not supported"),
        (changed(FP8_DYNAMIC, "input_activations", dynamic=False), "static, are not supported"),
    ],
)
def test_other_schemes_are_refused_by_name(
    model: Path, tmp_path: Path, scheme: dict[str, object], complaint: str
) -> None:
    # There are no weights at all: the configuration alone is enough.
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    with pytest.raises(ConfigurationError, match=f"quantization_config: .*{complaint}"):
        load(tmp_path)


def test_matrices_that_units_cannot_multiply_are_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family(tmp_path, "smol")

    def read(*_: object) -> torch.Tensor:
        raise AssertionError("no weight is needed to see that")

    monkeypatch.setattr("services.worker.engine.checkpoints.safetensors_directory.SafetensorsTensors.read", read)
    with pytest.raises(ConfigurationError, match="multiples of 16: rank 0 of 1 has 72 hidden_size"):
        load(tmp_path, quantization="fp8")


def test_unsupported_quantization_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="quantization 'int4' is not one of auto, fp8"):
        load(model, quantization="int4")
    save_model(tmp_path, "GPTNeoX", {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4})
    with pytest.raises(ConfigurationError, match="'gpt_neox' runs through transformers, with weights as they are"):
        load(tmp_path, quantization="fp8")


@pytest.mark.parametrize(
    ("dtype", "capability", "complaint"),
    [
        (torch.bfloat16, (8, 0), "compute capability 8.9 or later; this one has 8.0"),
        (torch.float16, (9, 0), "in bfloat16 on a GPU, not in torch.float16"),
    ],
)
def test_gpus_that_do_not_multiply_fp8_are_refused(
    dtype: torch.dtype, capability: tuple[int, int], complaint: str
) -> None:
    check_device(PER_CHANNEL, torch.bfloat16, (9, 0))
    with pytest.raises(ConfigurationError, match=complaint):
        check_device(PER_CHANNEL, dtype, capability)
