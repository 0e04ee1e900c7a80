"""Checkpoints of every quantised format against what they stand for, multiplied in float64 by `transformers`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, save_model
from tests.services.worker.engine.quantization.fp8_checkpoints import change_config
from tests.services.worker.engine.quantization.stored_formats import (
    FP8_BLOCKS,
    FP8_STATIC,
    INT8,
    SCHEMES,
    awq,
    compressed_config,
    gptq,
    store_quantised,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

pytestmark = pytest.mark.extended

PROMPT = random_ids(24, VOCABULARY)
# Two ranks cut feed-forward columns at 192, inside of groups of 128, or at 256 where they must not.
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2, "initializer_range": 0.05,
}  # fmt: skip
# Where the two halves of what is scaled token by token lie on two ranks.
HALVES = {"o_proj": [128, 128], "down_proj": [192, 192]}
WIDE = [name for name, scheme in SCHEMES.items() if scheme.round_inputs is None]
ROUNDED = [name for name, scheme in SCHEMES.items() if scheme.round_inputs is not None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain"), "Llama", {**FAMILIES["llama biased"][1], **SHAPE})


def stored(plain: Path, directory: Path, scheme: str, **options: Any) -> dict[str, torch.Tensor]:
    """Write the model `plain` to `directory` in a format; return its matrices in float64."""
    shutil.copytree(plain, directory, dirs_exist_ok=True)
    return store_quantised(directory, SCHEMES[scheme], **options)


def reference(
    plain: Path, scheme: str, weights: dict[str, torch.Tensor], shares: dict[str, list[int]] | None = None
) -> torch.Tensor:
    """Return what `transformers` computes in float64 with these weights, and inputs rounded as the format says.

    Inputs of a matrix that is in `shares` are rounded in such parts.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64).eval()
    modules, rounding = dict(model.named_modules()), SCHEMES[scheme].round_inputs
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        modules[stem].weight.data = weight
        if rounding is not None:
            parts = (shares or {}).get(stem.rpartition(".")[2])
            modules[stem].register_forward_pre_hook(rounded_inputs(rounding, parts))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def rounded_inputs(round_inputs: Callable[[torch.Tensor], torch.Tensor], parts: list[int] | None) -> Any:
    """Return a hook that rounds inputs, in such parts."""

    def hook(_: object, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        pieces = torch.split(given[0], parts, dim=-1) if parts else [given[0]]
        return (torch.cat([round_inputs(piece) for piece in pieces], dim=-1),)

    return hook


def logits_of(directory: Path | str, **changes: Any) -> torch.Tensor:
    runner = load(directory, **changes)
    driver = Driver(runner)
    logits = driver.run([(driver.open(len(PROMPT)), PROMPT)], all_tokens=True)
    runner.close()
    return logits


def compute_as_rank(rank: int, world_size: int, rendezvous: str, model: str) -> torch.Tensor:
    return logits_of(model, rank=rank, world_size=world_size, rendezvous=rendezvous)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def assert_close_but_for_ties(got: torch.Tensor, expected: torch.Tensor, wide: torch.Tensor) -> None:
    """Now and then an activation is rounded the other way; then this token and later ones get a little else."""
    exact = ((got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)) < 1e-4
    assert exact[:3].any()
    assert error(got, expected) < 0.5 * error(wide, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_logits_are_those_of_the_stored_weights(scheme: str, backend: str, plain: Path, tmp_path: Path) -> None:
    weights = stored(plain, tmp_path, scheme)
    assert len(weights) == 14
    expected = reference(plain, scheme, weights)
    got = logits_of(tmp_path, backend=backend)
    if scheme in WIDE:
        assert error(got, expected) < 1e-5
    else:
        assert_close_but_for_ties(got, expected, logits_of(plain))
    # The format changes what the model computes.
    assert error(logits_of(plain), expected) > 2e-3


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # It also rotates a part of each head, for which rows of queries and keys are put in another order.
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    options = {**FAMILIES["phi3"][1], **SHAPE, "rope_parameters": rotary}
    return save_model(tmp_path_factory.mktemp("fused"), "Phi3", options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_that_are_stored_as_one_are_cut(scheme: str, fused: Path, tmp_path: Path) -> None:
    weights = stored(fused, tmp_path, scheme)
    assert {name.split(".")[-2] for name in weights} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    expected, got = reference(fused, scheme, weights), logits_of(tmp_path, backend="compiled")
    if scheme in WIDE:
        assert error(got, expected) < 1e-5
    else:
        assert_close_but_for_ties(got, expected, logits_of(fused))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_ranks_compute_the_same(scheme: str, plain: Path, tmp_path: Path, ranks: Ranks) -> None:
    weights = stored(plain, tmp_path, scheme)
    together = ranks.run(compute_as_rank, 2, str(tmp_path))[0]
    expected = reference(plain, scheme, weights, HALVES if scheme == "int8" else None)
    if scheme in WIDE:
        assert error(together, expected) < 1e-5
    else:
        assert_close_but_for_ties(together, expected, logits_of(plain))


@pytest.mark.parametrize("scheme", ["fp8 blocks", "fp8 static", "int8", "awq 32", "gptq act-order"])
def test_experts_are_read_in_every_format(scheme: str, tmp_path: Path) -> None:
    name, options = FAMILIES["qwen3 moe"]
    plain = save_model(tmp_path / "plain", name, {**options, **SHAPE, "moe_intermediate_size": 128, "num_experts": 2})
    stored_in = tmp_path / "stored"
    weights = stored(plain, stored_in, scheme)
    # Both experts are chosen for every token: roundings change no choice.
    change_config(plain, num_experts_per_tok=2)
    change_config(stored_in, num_experts_per_tok=2)
    with_stored = dict(load_file(plain / "model.safetensors"))
    for matrix, weight in weights.items():
        with_stored[matrix] = weight.float()
    save_file(with_stored, plain / "model.safetensors")
    widened, got = logits_of(plain), logits_of(stored_in)
    assert error(got, widened.double()) < (1e-5 if scheme in WIDE else 0.2)


@pytest.mark.parametrize("scheme", ["fp8 blocks", "int8", "awq 128", "compressed 4 bits"])
def test_layers_that_were_left_out_are_used_as_they_are(scheme: str, plain: Path, tmp_path: Path) -> None:
    weights = stored(plain, tmp_path, scheme, but=("layers.0.", "down_proj"))
    assert len(weights) == 6
    got, expected = logits_of(tmp_path), reference(plain, scheme, weights)
    assert error(got, expected) < (1e-5 if scheme in WIDE else 5e-3)


@pytest.mark.parametrize("scheme", ["fp8 blocks", "int8", "awq 128", "gptq", "compressed zero points"])
def test_random_weights_are_made_in_the_format(scheme: str, plain: Path, tmp_path: Path) -> None:
    stored(plain, tmp_path, scheme)
    (tmp_path / "model.safetensors").unlink()
    made = logits_of(tmp_path, load_format="dummy")
    shutil.copy(plain / "config.json", tmp_path)
    wide = logits_of(tmp_path, load_format="dummy")
    assert 1e-3 < error(made, wide.double()) < 0.5


@pytest.mark.parametrize(
    ("scheme", "name", "tensor", "complaint"),
    [
        ("awq 128", "scales", torch.zeros(3, 256), r"scales of the shape \(256, 3\) where \(256, 2\) belongs"),
        ("awq 128", "scales", torch.full((2, 256), float("nan")), "scales that are no numbers"),
        ("gptq", "qweight", torch.zeros(8, 256, dtype=torch.int32), r"integers of the shape \(256, 64\)"),
        ("gptq act-order", "g_idx", torch.full((256,), 9, dtype=torch.int32), "does not assign 256 inputs to 4 groups"),
        ("gptq", "qzeros", None, "no tensor .*qzeros"),
        ("fp8 blocks", "weight_scale_inv", torch.ones(1, 2), r"scales of the shape \(1, 2\), not \(2, 2\)"),
        ("fp8 static", "input_scale", None, "no tensor .*input_scale"),
        ("fp8 static", "input_scale", torch.zeros(1), "input_scale that is not above 0"),
        ("int8", "weight_scale", torch.ones(5, 1), "has 5 scales where 256 belong"),
    ],
)
def test_damaged_matrices_are_named(
    scheme: str, name: str, tensor: torch.Tensor | None, complaint: str, plain: Path, tmp_path: Path
) -> None:
    stored(plain, tmp_path, scheme)
    tensors = load_file(tmp_path / "model.safetensors")
    damaged = f"model.layers.1.self_attn.q_proj.{name}"
    tensors.pop(damaged)
    save_file(tensors if tensor is None else {**tensors, damaged: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=complaint):
        load(tmp_path)


def test_projections_of_the_same_inputs_must_have_one_order(plain: Path, tmp_path: Path) -> None:
    stored(plain, tmp_path, "gptq act-order")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.g_idx"] = tensors["model.layers.0.self_attn.k_proj.g_idx"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"k_proj.*: different orders of inputs \(g_idx\) are not supported"):
        load(tmp_path)


def test_ranks_that_would_cut_blocks_of_activations_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", {**FAMILIES["llama"][1], **SHAPE, "head_dim": 32})
    change_config(tmp_path, quantization_config=FP8_BLOCKS)
    with pytest.raises(ConfigurationError, match=r"cut between 128 inputs: rank 0 of 2 would have columns 0 to 64"):
        load(tmp_path, rank=0, world_size=2, rendezvous="127.0.0.1:1")


def test_other_quantization_on_top_is_refused(plain: Path, tmp_path: Path) -> None:
    stored(plain, tmp_path, "awq 128")
    with pytest.raises(ConfigurationError, match="quantization=fp8: the checkpoint's weights are quantised in another"):
        load(tmp_path, quantization="fp8")


def weights(**changes: object) -> dict[str, Any]:
    """Return INT8 with other weights."""
    group = INT8["config_groups"]["group_0"]
    return compressed_config("int-quantized", {**group["weights"], **changes}, group["input_activations"])


PACKED = SCHEMES["compressed 4 bits"].config["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("scheme", "complaint"),
    [
        ({**FP8_BLOCKS, "weight_block_size": [64, 64]}, r"a scale for each block \[64, 64\] are"),
        ({**FP8_BLOCKS, "activation_scheme": "static"}, "'static' together with weight_block_size is"),
        ({**FP8_STATIC, "fmt": "e5m2"}, "fmt: FP8 numbers of the form 'e5m2' are"),
        ({**awq(128).config, "version": "gemv"}, "version: AWQ weights in the layout 'gemv' are"),
        ({**awq(128).config, "bits": 3}, "bits: AWQ weights of 3 bits are"),
        ({**gptq(4, 128).config, "bits": 3}, "weights of 3 bits are"),
        ({**gptq(4, 128).config, "checkpoint_format": "marlin"}, "GPTQ weights stored as 'marlin' are"),
        ({**gptq(4, 128).config, "group_size": 24}, "group_size: a scale for each 24 inputs is"),
        ({**gptq(4, 128).config, "dynamic": {"-:.*": {}}}, "dynamic: GPTQ weights of different bits"),
        (weights(strategy="tensor"), "INT8 weights with a scale for each 'tensor' are"),
        (weights(symmetric=False), "weights with zero points are"),
        (weights(num_bits=4), "weights of 4 bits, 'int', are"),
        (compressed_config("int-quantized", INT8["config_groups"]["group_0"]["weights"], None), "input_activations"),
        (compressed_config("pack-quantized", {**PACKED, "type": "float"}, None), "packed weights of the type 'float'"),
        (compressed_config("pack-quantized", PACKED, {"num_bits": 8}), "with quantised input_activations are"),
        (compressed_config("marlin-24", PACKED, None), "weights stored as 'marlin-24' are"),
        ({"quant_method": "bitsandbytes"}, "weights quantised by 'bitsandbytes' are"),
    ],
)
def test_other_variants_are_refused_by_name(
    plain: Path, tmp_path: Path, scheme: dict[str, object], complaint: str
) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    change_config(tmp_path, quantization_config=scheme)
    with pytest.raises(ConfigurationError, match=f"quantization_config: .*{complaint}.* not supported"):
        load(tmp_path)
