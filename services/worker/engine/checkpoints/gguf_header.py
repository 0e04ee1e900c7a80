"""The header of a GGUF file: metadata and where the tensors are (the format's versions 2 and 3).

The `gguf` package reads it too, but takes seconds to wrap each of a vocabulary's entries, which a worker never needs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Value types by their number in the file.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `rows` rows of `row_bytes` bytes from `offset` on; `shape` counts elements, rows first."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata fields and tensors by name. Arrays of strings are kept as their length only."""

    fields: Mapping[str, Any]  # as GGUF types them: numbers, strings, booleans, lists of numbers
    tensors: Mapping[str, TensorInfo]


def parse_header(data: bytes | memoryview) -> GgufHeader:
    """Read the header of a file's content.

    Raises:
        ValueError: this is no GGUF file, or of a version that is not known.
    """
    reader = _Reader(data)
    if reader.take(4) != _MAGIC:
        raise ValueError("the file does not begin with GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise ValueError(f"GGUF version {version} is not one of {_VERSIONS}; big-endian files are not supported")
    tensor_count, field_count = reader.number("<Q"), reader.number("<Q")
    fields = {}
    for _ in range(field_count):
        name = reader.string()
        fields[name] = reader.value(reader.number("<I"))
    entries = [reader.tensor() for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-reader.position // alignment) * alignment
    tensors = {name: _locate(shape, kind, start + offset) for name, shape, kind, offset in entries}
    return GgufHeader(fields, tensors)


class _Reader:
    """A position in the header that moves on with every read."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise ValueError("the file ends within its header")
        return bytes(self._data[start : self.position])

    def number(self, layout: str) -> Any:  # what struct returns for `layout`
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:  # see GgufHeader.fields
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self._layout(kind))
        item_kind, count = self.number("<I"), self.number("<Q")
        if item_kind == _STRING:
            for _ in range(count):
                self.position += 8 + struct.unpack_from("<Q", self._data, self.position)[0]
            return count
        if item_kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        layout = self._layout(item_kind)
        return list(struct.unpack(f"<{count}{layout[1]}", self.take(count * struct.calcsize(layout))))

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string()
        # The file counts the innermost dimension first.
        shape = tuple(self.number("<Q") for _ in range(self.number("<I")))[::-1]
        return name, shape, GGMLQuantizationType(self.number("<I")), self.number("<Q")

    def _layout(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return _SCALARS[kind]


def _locate(shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> TensorInfo:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return TensorInfo(shape, kind, offset, rows, shape[-1] // block_elements * block_bytes)
