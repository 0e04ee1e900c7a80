from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from common import gguf_header
from common.errors import ConfigurationError
from common.gguf_header import TensorEntry, read_header
from common.models import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_reads_the_same_header_as_the_gguf_package() -> None:
    path = resolve_model("smollm2-135m-instruct").path
    reader = gguf.GGUFReader(str(path))
    header = read_header(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    read = {name: list(value) if isinstance(value, tuple) else value for name, value in header.metadata.items()}
    assert read == expected
    assert dict(header.tensors) == {
        tensor.name: TensorEntry(tuple(tensor.shape.tolist())[::-1], int(tensor.tensor_type), tensor.data_offset)
        for tensor in reader.tensors
    }


@pytest.mark.parametrize("alignment", [None, 8, 64])
def test_tensors_lie_where_the_table_says(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "tensors.gguf"
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float16)
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors, data = read_header(path).tensors, path.read_bytes()
    assert {name: (entry.shape, entry.kind) for name, entry in tensors.items()} == {
        "first": ((2, 3), gguf.GGMLQuantizationType.F32),
        "second": ((5,), gguf.GGMLQuantizationType.F16),
    }
    for name, values in (("first", first), ("second", second)):
        offset = tensors[name].offset
        assert offset % (alignment or 32) == 0
        assert data[offset : offset + values.nbytes] == values.tobytes()


def test_every_value_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "äöü")
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("strings", ["", "a", "漢"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert dict(read_header(path).metadata) == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 1e300,
        "yes": True,
        "text": "äöü",
        "floats": (0.5, -1.5),
        "strings": ("", "a", "漢"),
    }


@pytest.mark.parametrize("length", [0, 3, 4, 20, 100, 5000])
def test_a_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    with resolve_model("smollm2-135m-instruct").path.open("rb") as whole:
        head = whole.read(length)
    path = tmp_path / "cut.gguf"
    path.write_bytes(head)
    with pytest.raises(ConfigurationError, match=r"cut\.gguf"):
        read_header(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(64))
    with pytest.raises(ConfigurationError, match="version 1"):
        read_header(path)


def many_strings(path: Path) -> Path:
    """Write a file whose header is longer than what is read at a time."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_array("strings", [f"a string with the number {number}" for number in range(100_000)])
    writer.add_array("numbers", list(range(400_000)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_long_header_is_read_in_parts(tmp_path: Path) -> None:
    path = many_strings(tmp_path / "long.gguf")
    assert path.stat().st_size > 2 * gguf_header._READ_BYTES
    metadata = read_header(path).metadata
    assert metadata["strings"] == tuple(f"a string with the number {number}" for number in range(100_000))
    assert metadata["numbers"] == tuple(range(400_000))


@pytest.mark.parametrize("reads", [1, 2])
def test_a_file_that_is_truncated_while_its_header_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """A mapping of it could not be touched any more."""
    path = many_strings(tmp_path / "shrinking.gguf")
    read_string, strings = gguf_header._Cursor._read_string, []

    def truncate(self: Any) -> str:
        strings.append(read_string(self))
        if len(strings) == reads:
            os.truncate(path, 0)
        return strings[-1]

    monkeypatch.setattr(gguf_header._Cursor, "_read_string", truncate)
    with pytest.raises(ConfigurationError, match=r"shrinking\.gguf: damaged .*truncated while it was read"):
        read_header(path)


def test_a_header_that_names_more_than_the_file_has_is_refused_without_reading_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lying.gguf"
    lie = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 10, 1 << 60)
    path.write_bytes(lie)
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigurationError, match=r"lying\.gguf: damaged"):
        read_header(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises((ConfigurationError, IsADirectoryError)):
        read_header(tmp_path / "model.gguf")
