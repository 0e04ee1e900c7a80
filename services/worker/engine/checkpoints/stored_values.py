"""Whether the values of files with weights are numbers: one that is not would spoil all that is computed with it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from common.errors import ConfigurationError
from common.gguf_header import read_header
from services.worker.engine.checkpoints.safetensors_file import SafetensorsFile
from services.worker.engine.checkpoints.weight_file import WeightFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Files are read, not mapped: pages of a mapping would count as memory of the process.
_CHUNK = 1 << 24
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The bytes of a GGUF block at which float16 scales and shifts begin; the rest are integers.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor's bytes are, in blocks of `block` bytes that have floating-point numbers at `places`."""

    name: str
    start: int
    end: int
    dtype: torch.dtype
    block: int
    places: tuple[int, ...] = (0,)

    def is_finite(self, data: memoryview) -> bool:
        """Return whether all numbers of whole blocks are finite."""
        blocks = torch.frombuffer(data, dtype=torch.uint8).view(-1, self.block)
        size = self.dtype.itemsize
        parts = [blocks] if size == self.block else [blocks[:, at : at + size] for at in self.places]
        # In one pass: far faster than `torch.isfinite`.
        extremes = [torch.stack(torch.aminmax(part.contiguous().view(self.dtype))) for part in parts]
        return bool(torch.isfinite(torch.stack(extremes)).all())


def check_values(path: Path, share: int = 0, shares: int = 1) -> None:
    """Read every `shares`-th tensor from number `share` on, and check that no value is infinite or not a number.

    Only numbers of 16 bits and more are checked, and those of GGUF's blocks by which integers are multiplied.

    Raises:
        ConfigurationError: one is, or the file ends within a tensor.
    """
    stored = _of_gguf(path) if _is_gguf(path) else _of_safetensors(path)
    file, buffer = WeightFile(path), memoryview(bytearray(_CHUNK))
    for tensor in islice(stored, share, None, shares):
        chunk = _CHUNK // tensor.block * tensor.block
        for start in range(tensor.start, tensor.end, chunk):
            data = buffer[: min(chunk, tensor.end - start)]
            file.fill(f"the tensor {tensor.name!r}", data, start)
            if not tensor.is_finite(data):
                raise ConfigurationError(f"{path}: the tensor {tensor.name!r} has values that are no numbers")


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _of_safetensors(path: Path) -> Iterator[_Stored]:
    for name, array in SafetensorsFile(path).arrays.items():
        dtype = _FLOATS.get(array.dtype)
        if dtype is not None:
            yield _Stored(name, array.start, array.end, dtype, dtype.itemsize)


def _of_gguf(path: Path) -> Iterator[_Stored]:
    for name, entry in read_header(path).tensors.items():
        kind = GGMLQuantizationType(entry.kind)
        elements, block = GGML_QUANT_SIZES[kind]
        end = entry.offset + torch.Size(entry.shape).numel() // elements * block
        if kind.name in _FLOATS:
            yield _Stored(name, entry.offset, end, _FLOATS[kind.name], block)
        elif kind.name in _HALVES:
            yield _Stored(name, entry.offset, end, torch.float16, block, _HALVES[kind.name])
