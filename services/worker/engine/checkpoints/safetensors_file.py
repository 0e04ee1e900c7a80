"""Single tensors of a safetensors file, read without mapping it.

A process that touches a mapping ends by SIGBUS when another one has truncated the file meanwhile, and the library's
tensors are such mappings. Format: https://huggingface.co/docs/safetensors, the same checks as the library's.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import torch

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.weight_file import WeightFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_MAX_HEADER_BYTES: Final = 100_000_000
# Rows of which only some columns are wanted are read in parts of this size.
_PART_BYTES: Final = 1 << 22
# From this size on, memory comes in huge pages, whose first use takes a fraction of the time.
_LARGE_BYTES: Final = 1 << 22
# A core copies 2 to 3 GB/s out of the system's cache into new memory: large blocks are divided among threads.
_SHARE_BYTES: Final = 1 << 24
_THREADS: Final = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor of the file, which occupies its bytes [`start`, `end`)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """Reads tensors and blocks of them, each into memory of its own."""

    def __init__(self, path: Path) -> None:
        """Open `path` and read its header.

        Raises:
            ConfigurationError: it cannot be read, is damaged, or ends before its tensors do.
        """
        self._path = path
        self._threads = ThreadPoolExecutor(_THREADS, "weight-reader")
        try:
            self._file = WeightFile(path)
            self.arrays = self._read_header()
        except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise ConfigurationError(f"{path} is damaged: {error}") from error

    def read(
        self, name: str, index: int | None = None, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return a tensor, or a block of rows and columns of it or of the matrix with an `index` in it.

        A block that goes beyond the tensor ends with it, as with the library: callers check shapes.

        Raises:
            ConfigurationError: the tensor has no such block or a type that is not supported, or the file has changed
                since it was opened.
        """
        stored = self.arrays[name]
        dtype, shape, start = DTYPES.get(stored.dtype), stored.shape, stored.start
        if dtype is None:
            raise ConfigurationError(f"{self._path}: the tensor {name!r} is stored as {stored.dtype}, not supported")
        if index is not None:
            count = shape[0] if shape else 0
            if not 0 <= index < count:
                raise ConfigurationError(f"{self._path}: the tensor {name!r} has {count} matrices, none at {index}")
            shape = shape[1:]
            start += index * math.prod(shape) * dtype.itemsize
        if rows is not None:
            rows = self._within(name, rows, shape, 0)
            start += rows.start * math.prod(shape[1:]) * dtype.itemsize
            shape = (rows.stop - rows.start, *shape[1:])
        if columns is None:
            return self._read(name, start, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        columns = self._within(name, columns, shape, 1)
        return self._read_columns(name, start, dtype, shape, columns)

    def _read_columns(
        self, name: str, start: int, dtype: torch.dtype, shape: tuple[int, ...], columns: slice
    ) -> torch.Tensor:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        block = torch.empty((shape[0], columns.stop - columns.start, *shape[2:]), dtype=dtype)
        height = max(1, _PART_BYTES // max(1, row_bytes))
        for first in range(0, shape[0], height):
            part = block[first : first + height]
            read = self._read(name, start + first * row_bytes, len(part) * row_bytes)
            part.copy_(read.view(dtype).view(len(part), *shape[1:])[:, columns])
        return block

    def _read(self, name: str, start: int, size: int) -> torch.Tensor:
        """Return bytes of the file."""
        part = f"the tensor {name!r}"
        data = _allocate(size)
        view = data.numpy().data
        parts = [view[first : first + _SHARE_BYTES] for first in range(0, size, _SHARE_BYTES)]
        if len(parts) == 1:
            self._file.fill(part, view, start)
        else:
            starts = range(start, start + size, _SHARE_BYTES)
            for _ in self._threads.map(self._file.fill, repeat(part), parts, starts):
                pass
        self._file.check_unchanged(part)
        return data

    def _within(self, name: str, part: slice, shape: tuple[int, ...], dimension: int) -> slice:
        size = shape[dimension] if dimension < len(shape) else 0
        first, last = part.start or 0, size if part.stop is None else min(part.stop, size)
        if not 0 <= first <= last:
            raise ConfigurationError(
                f"{self._path}: the tensor {name!r} has {size} parts in dimension {dimension}, not {first} to {last}"
            )
        return slice(first, last)

    def _read_header(self) -> dict[str, StoredArray]:
        (length,) = struct.unpack("<Q", self._header_bytes(0, 8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(self._header_bytes(8, length))
        if not isinstance(header, dict):
            raise TypeError("its header is no object")
        arrays = {name: _stored(entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length
        for name, array in sorted(arrays.items(), key=lambda item: (item[1].start, item[1].end)):
            if array.start != end or array.end < array.start:
                raise ValueError(f"the tensor {name!r} is not where the one before it ends")
            end = array.end
        if self._file.size != end:
            raise ValueError(f"it has {self._file.size} bytes, and its tensors end at {end}")
        return arrays

    def _header_bytes(self, start: int, size: int) -> bytes:
        if start + size > self._file.size:
            raise ValueError("it ends within its header")
        content = bytearray(size)
        self._file.fill("its header", memoryview(content), start)
        return bytes(content)


def _stored(entry: Mapping[str, Any], base: int) -> StoredArray:
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, start, end)):
        raise ValueError(f"a shape of {shape}, from {start} to {end}")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"{end - start} bytes for the shape {shape} of {entry['dtype']}")
    return StoredArray(entry["dtype"], shape, base + start, base + end)


def _allocate(size: int) -> torch.Tensor:
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)
