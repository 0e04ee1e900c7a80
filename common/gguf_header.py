"""Reader of GGUF headers: the metadata, and the shapes and offsets of the tensors.

The `gguf` package can read them too, but it creates one array object per string, which takes two seconds for a
vocabulary of 49,152 and would delay every start of tokenizer, detokenizer and worker. Format: ggml's docs/gguf.md,
versions 2 and 3.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO
    from pathlib import Path

Scalar: TypeAlias = "bool | int | float | str"
Value: TypeAlias = "Scalar | tuple[Scalar, ...]"
Metadata: TypeAlias = "Mapping[str, Value]"

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

# Struct formats of the fixed-size value types, by their number in the file; strings and arrays are read separately.
_STRING: Final = 8
_ARRAY: Final = 9
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_MAX_STRING_BYTES: Final = 1 << 26
# ggml's own limit; a file with more is damaged.
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
# Most headers are a few megabytes long.
_READ_BYTES: Final = 1 << 21


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the file: it starts at byte `offset`; `kind` is ggml's number of its element type."""

    # Outermost dimension first.
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and the tensor table of a file."""

    metadata: Metadata
    tensors: Mapping[str, TensorEntry]


def read_header(path: Path) -> GgufHeader:
    """Read the header of the GGUF file at `path`, but not the contents of its tensors.

    The file is not mapped: a process that touches a mapping ends when another one has truncated the file meanwhile.

    Raises:
        ConfigurationError: the file is not a GGUF file of a known version, or is truncated.
    """
    with open(path, "rb", buffering=0, opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ConfigurationError(f"{path}: not a GGUF file, nor any regular file")
        head = file.read(len(MAGIC))
        if head != MAGIC:
            raise ConfigurationError(f"{path}: not a GGUF file")
        try:
            return _Cursor(file, found.st_size, head).read_header()
        except (struct.error, UnicodeDecodeError, KeyError, _MalformedError) as error:
            raise ConfigurationError(f"{path}: damaged or unknown GGUF header ({error})") from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for a writer


class _MalformedError(Exception):
    """The bytes do not follow the format."""


class _Cursor:
    """A position in a file, advanced by every read; keeps what was read so far."""

    def __init__(self, file: FileIO, size: int, head: bytes) -> None:
        self._file = file
        self._size = size
        self._buffer = head
        self._position = len(head)

    def read_header(self) -> GgufHeader:
        """Read the version, the counts, all key-value pairs and the tensor table."""
        version = self._read_scalar("I")
        if version not in VERSIONS:
            raise _MalformedError(f"version {version}; supported versions are {VERSIONS}")
        tensors, pairs = int(self._read_scalar("Q")), int(self._read_scalar("Q"))
        metadata: dict[str, Value] = {}
        for _ in range(pairs):
            key = self._read_string()
            metadata[key] = self._read_value(int(self._read_scalar("I")))
        entries = dict(self._read_entry() for _ in range(tensors))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _MalformedError(f"an alignment of {alignment!r}")
        # Offsets in the table are relative to the first aligned byte after it.
        start = -(-self._position // alignment) * alignment
        return GgufHeader(
            metadata, {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}
        )

    def _read_entry(self) -> tuple[str, TensorEntry]:
        name, dimensions = self._read_string(), int(self._read_scalar("I"))
        if dimensions > _MAX_DIMENSIONS:
            raise _MalformedError(f"a tensor of {dimensions} dimensions")
        sizes = [int(self._read_scalar("Q")) for _ in range(dimensions)]
        return name, TensorEntry(tuple(reversed(sizes)), int(self._read_scalar("I")), int(self._read_scalar("Q")))

    def _read_value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._read_string()
        if kind != _ARRAY:
            return self._read_scalar(_FORMATS[kind])
        kind, count = int(self._read_scalar("I")), int(self._read_scalar("Q"))
        if kind == _STRING:
            return self._read_strings(count)
        if kind == _ARRAY:
            raise _MalformedError("arrays of arrays are not supported")
        return self._unpack(f"<{count}{_FORMATS[kind]}")

    def _read_scalar(self, layout: str) -> Scalar:
        (scalar,) = self._unpack("<" + layout)
        return scalar

    def _unpack(self, layout: str) -> tuple[Scalar, ...]:
        end = self._position + struct.calcsize(layout)
        if end > len(self._buffer):
            self._read_until(end)
        values = struct.unpack_from(layout, self._buffer, self._position)
        self._position = end
        return values

    def _read_string(self) -> str:
        return self._read_strings(1)[0]

    def _read_strings(self, count: int) -> tuple[str, ...]:
        buffer, position, unpack = self._buffer, self._position, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            if start > len(buffer):
                buffer = self._read_until(start)
            (length,) = unpack(buffer, position)
            position = start + length
            if length > _MAX_STRING_BYTES:
                raise _MalformedError(f"a string of {length} bytes")
            if position > len(buffer):
                buffer = self._read_until(position)
            strings.append(buffer[start:position].decode())
        self._position = position
        return tuple(strings)

    def _read_until(self, end: int) -> bytes:
        """Read on until the first `end` bytes of the file are there; return what is."""
        if end > self._size:
            raise _MalformedError("the file ends within it")
        while len(self._buffer) < end:
            more = self._file.read(max(end - len(self._buffer), len(self._buffer), _READ_BYTES))
            if not more:
                raise _MalformedError("the file was truncated while it was read")
            self._buffer += more
        return self._buffer
