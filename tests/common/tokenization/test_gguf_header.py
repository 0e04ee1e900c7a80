from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import pytest

from common.errors import ConfigurationError
from common.models import resolve
from common.tokenization.gguf_header import read_metadata

if TYPE_CHECKING:
    from pathlib import Path


def test_equals_what_the_gguf_package_reads() -> None:
    path = resolve("smollm2-135m-instruct").path
    reader = gguf.GGUFReader(str(path))
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    read = {name: list(value) if isinstance(value, tuple) else value for name, value in read_metadata(path).items()}
    assert read == expected


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
    assert dict(read_metadata(path)) == {
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
    with resolve("smollm2-135m-instruct").path.open("rb") as whole:
        head = whole.read(length)
    path = tmp_path / "cut.gguf"
    path.write_bytes(head)
    with pytest.raises(ConfigurationError, match=r"cut\.gguf"):
        read_metadata(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(64))
    with pytest.raises(ConfigurationError, match="version 1"):
        read_metadata(path)
