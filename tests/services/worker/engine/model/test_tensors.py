from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsCheckpoint
from services.worker.engine.model.tensors import CheckedTensors
from services.worker.engine.quantization.fp8 import FP8, Fp8Matrix, quantise
from tests.services.worker.engine.families import save_family
from tests.services.worker.engine.quantization.fp8_bounds import widened
from tests.services.worker.engine.quantization.fp8_checkpoints import (
    FP8_DYNAMIC,
    PER_TENSOR,
    change_config,
    store_in_fp8,
)

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj.weight"
Q, K, V = (f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv")


def tensors_of(directory: Path, *, quantises: bool = False) -> CheckedTensors:
    return CheckedTensors(SafetensorsCheckpoint(directory), CPU, quantise if quantises else None)


def replace_tensor(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, directory / "model.safetensors")


def same(matrix: object, other: object) -> bool:
    assert isinstance(matrix, Fp8Matrix)
    assert isinstance(other, Fp8Matrix)
    return torch.equal(matrix.values.float(), other.values.float()) and torch.equal(matrix.scales, other.scales)


def test_shares_of_ranks_are_cut_out_of_the_matrix_that_one_rank_would_hold(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    wide, reader = load_file(tmp_path / "model.safetensors"), tensors_of(tmp_path, quantises=True)
    whole = quantise(wide[DOWN])
    assert same(reader.matrix(DOWN), whole)
    for part in (slice(48), slice(48, 80)):
        assert same(reader.matrix(DOWN, columns=part), whole.columns(part))
    rows = slice(16, 48)
    assert same(reader.matrix(Q, rows), quantise(wide[Q][rows]))


@pytest.mark.parametrize("scheme", [FP8_DYNAMIC, PER_TENSOR])
def test_stored_fp8_matrices_are_read_with_their_scales(tmp_path: Path, scheme: dict[str, object]) -> None:
    save_family(tmp_path, "llama")
    wide = load_file(tmp_path / "model.safetensors")
    store_in_fp8(tmp_path, scheme)
    reader = tensors_of(tmp_path)
    for name, rows, columns in ((DOWN, None, None), (DOWN, None, slice(48, 80)), (Q, slice(16, 48), None)):
        matrix = reader.matrix(name, rows, columns)
        assert isinstance(matrix, Fp8Matrix)
        assert matrix.scales.dtype == torch.float32
        expected = wide[name][rows or slice(None)][:, columns or slice(None)]
        torch.testing.assert_close(widened(matrix), expected, atol=2e-3, rtol=2**-4 + 1e-5)


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        (f"{DOWN}_scale", None, "no tensor .*down_proj.weight_scale'"),
        (f"{DOWN}_scale", torch.ones(3, 1), "has 3 scales where 48 belong"),
        (f"{DOWN}_scale", torch.full((48, 1), float("nan")), "scales that are no numbers"),
        (DOWN, torch.zeros(48, 80, dtype=torch.int8), "stored as torch.int8"),
        (DOWN, torch.zeros(48, 80).to(torch.float8_e5m2), "stored as torch.float8_e5m2"),
    ],
)
def test_damaged_matrices_are_named(tmp_path: Path, name: str, tensor: torch.Tensor | None, complaint: str) -> None:
    save_family(tmp_path, "llama")
    store_in_fp8(tmp_path)
    replace_tensor(tmp_path, name, tensor)
    with pytest.raises(ConfigurationError, match=complaint):
        tensors_of(tmp_path).matrix(DOWN)


def test_matrices_of_one_product_must_be_stored_in_one_format(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    store_in_fp8(tmp_path, but=("1.self_attn.k_proj",))
    with pytest.raises(ConfigurationError, match=r"tensors .*k_proj.*: that only some are stored quantised is not"):
        tensors_of(tmp_path).alike([(name, None, None) for name in (Q, K, V)])


def test_fp8_is_of_projections_only_and_must_be_announced(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    replace_tensor(tmp_path, "model.embed_tokens.weight", embedding.to(FP8))
    with pytest.raises(ConfigurationError, match="no quantization_config that says how"):
        tensors_of(tmp_path).plain("model.embed_tokens.weight")
    change_config(tmp_path, quantization_config=FP8_DYNAMIC)
    with pytest.raises(ConfigurationError, match="supported of projections and experts only"):
        tensors_of(tmp_path).plain("model.embed_tokens.weight")
