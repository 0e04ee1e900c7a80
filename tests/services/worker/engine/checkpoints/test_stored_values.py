"""Values of files that are no numbers are found, in whichever form they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.torch import save_file

from common.errors import ConfigurationError
from services.worker.engine.checkpoints import stored_values
from services.worker.engine.checkpoints.stored_values import check_values
from services.worker.engine.quantization.gguf_blocks import KINDS

if TYPE_CHECKING:
    from pathlib import Path

# MXFP4 has scales of one byte.
BLOCK_KINDS = sorted(KINDS - {"MXFP4"})


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several reads per tensor, the last of them of less."""
    monkeypatch.setattr(stored_values, "_CHUNK", 4096)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 2048, 4999])
def test_a_value_of_a_tensor_is_found(tmp_path: Path, dtype: torch.dtype, value: float, place: int) -> None:
    path = tmp_path / "model.safetensors"
    bad = torch.randn(5000)
    bad[place] = value
    tensors = {"first": torch.randn(3, 5), "middle": bad, "none": torch.empty(0), "last": torch.randn(4)}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["ids"] = torch.full((4,), -1)
    save_file(tensors, path)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: the tensor 'middle' has values that are no"):
        check_values(path)
    save_file(tensors | {"middle": torch.full_like(tensors["middle"], 60000.0)}, path)
    check_values(path)


def test_shares_together_are_all_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for bad in range(5):
        save_file({f"t{i}": torch.full((3,), torch.nan if i == bad else 1.0) for i in range(5)}, path)
        found = []
        for share in range(3):
            try:
                check_values(path, share, 3)
            except ConfigurationError:
                found.append(share)
        assert len(found) == 1


def blocks_of(kind: GGMLQuantizationType, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return blocks of random bytes whose values are finite; those of GGUF are multiplied by float16 numbers."""
    _, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0).integers(0, 256, (4 * count, size), np.uint8)
    with np.errstate(all="ignore"):
        finite = [block for block in random if np.isfinite(dequantize(block[None], kind)).all()]
    return np.stack(finite[:count])


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_numbers_of_blocks_are_found(tmp_path: Path, name: str) -> None:
    """All pairs of bytes of a block are tried: those that make values no numbers are found, all others are not."""
    kind = GGMLQuantizationType[name]
    path, blocks = tmp_path / "model.gguf", blocks_of(kind, 300)
    spoilt = set()
    for at in range(0, blocks.shape[1], 2):
        changed = blocks.copy()
        changed[-1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
        with np.errstate(all="ignore"):
            if not np.isfinite(dequantize(changed[-1:], kind)).all():
                spoilt.add(at)
        writer = GGUFWriter(path, "llama")
        writer.add_tensor("norm", np.ones(40, np.float32))
        writer.add_tensor("matrix", changed.reshape(1, -1), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if at in spoilt:
            with pytest.raises(ConfigurationError, match="the tensor 'matrix' has values that are no numbers"):
                check_values(path)
        else:
            check_values(path)
    assert spoilt


def test_a_file_that_ends_within_a_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"only": torch.ones(5000)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=r"is damaged: it has .* bytes, and its tensors end at"):
        check_values(path)
