"""Reading safetensors files without mapping them, beside the library as an oracle."""

from __future__ import annotations

import gc
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from services.worker.engine.checkpoints import safetensors_file
from services.worker.engine.checkpoints.safetensors_file import DTYPES, SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "weights.safetensors"


def saved(directory: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, directory / NAME, metadata={"format": "pt"})
    return directory / NAME


def written(path: Path, header: object, data: bytes = b"") -> Path:
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_all_types_and_shapes_are_those_of_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.randint(0, 2, (4, 6, 2 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    path = saved(tmp_path, cube=data, scalar=data[0, 0, 0].clone(), empty=data[:0].clone(), row=data[0, 0].clone())
    expected, file = load_file(path), SafetensorsFile(path)
    assert file.arrays.keys() == expected.keys()
    for name, tensor in expected.items():
        found = file.read(name)
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert found.view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 22])
def test_blocks_are_parts_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(safetensors_file, "_PART_BYTES", part_bytes)
    cube, matrix = torch.randn(3, 10, 8), torch.randn(10, 8, dtype=torch.bfloat16)
    file = SafetensorsFile(saved(tmp_path, cube=cube, matrix=matrix))
    rows, columns = slice(2, 9), slice(3, 7)
    for found, wanted in (
        (file.read("matrix", rows=rows), matrix[rows]),
        (file.read("matrix", columns=columns), matrix[:, columns]),
        (file.read("matrix", rows=rows, columns=columns), matrix[rows, columns]),
        (file.read("matrix", rows=slice(4, 4), columns=columns), matrix[4:4, columns]),
        (file.read("cube", rows=slice(1, 3)), cube[1:3]),
        (file.read("cube", columns=columns), cube[:, columns]),
        (file.read("cube", 2), cube[2]),
        (file.read("cube", 1, rows), cube[1][rows]),
        (file.read("cube", 1, None, columns), cube[1][:, columns]),
        (file.read("cube", 0, rows, columns), cube[0][rows, columns]),
        # Blocks end with the tensor.
        (file.read("matrix", rows=slice(8, 12), columns=slice(6, 20)), matrix[8:, 6:]),
    ):
        assert torch.equal(found, wanted)


def test_large_blocks_are_read_in_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "_SHARE_BYTES", 1000)
    monkeypatch.setattr(safetensors_file, "_LARGE_BYTES", 1000)
    matrix = torch.randn(101, 33)
    file = SafetensorsFile(saved(tmp_path, matrix=matrix))
    assert torch.equal(file.read("matrix"), matrix)
    assert torch.equal(file.read("matrix", rows=slice(7, 99)), matrix[7:99])


@pytest.mark.parametrize(
    "block", [{"index": 3}, {"index": -1}, {"rows": slice(4, 5)}, {"index": 0, "columns": slice(5, 6)}]
)
def test_blocks_that_are_not_there_are_refused(tmp_path: Path, block: dict[str, object]) -> None:
    file = SafetensorsFile(saved(tmp_path, cube=torch.randn(3, 2, 4)))
    with pytest.raises(ConfigurationError, match="the tensor 'cube' has"):
        file.read("cube", **block)  # type: ignore[arg-type]  # of any kind


def test_a_scalar_has_no_matrices(tmp_path: Path) -> None:
    file = SafetensorsFile(saved(tmp_path, scalar=torch.tensor(3.0)))
    with pytest.raises(ConfigurationError, match="the tensor 'scalar' has 0 matrices"):
        file.read("scalar", 0)


@pytest.mark.parametrize("kept", [0, 4, 500])
@pytest.mark.parametrize("share_bytes", [1 << 24, 64])
def test_a_file_that_is_truncated_after_its_header_was_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, share_bytes: int
) -> None:
    monkeypatch.setattr(safetensors_file, "_SHARE_BYTES", share_bytes)
    matrix = torch.randn(64, 8)
    path = saved(tmp_path, matrix=matrix)
    file = SafetensorsFile(path)
    whole = file.read("matrix")
    os.truncate(path, kept)
    for columns in (None, slice(0, 4)):
        with pytest.raises(ConfigurationError, match=rf"{NAME} is damaged: it ends within the tensor 'matrix'"):
            file.read("matrix", columns=columns)
    assert torch.equal(whole, matrix), "it is no mapping"


def test_a_tensor_that_another_process_writes_meanwhile_is_refused(tmp_path: Path) -> None:
    """A file that is truncated while it is read gives zeros, not always a shorter answer."""
    path = saved(tmp_path, matrix=torch.randn(64, 8))
    file = SafetensorsFile(path)
    with path.open("r+b") as written:
        written.seek(-8, os.SEEK_END)
        written.write(bytes(8))
    os.utime(path, ns=(1, 1))  # later or not: times of changes are not as fine everywhere
    for columns in (None, slice(0, 4)):
        with pytest.raises(ConfigurationError, match=f"{NAME} is damaged: it changed while the tensor 'matrix'"):
            file.read("matrix", columns=columns)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / NAME)
    with pytest.raises(ConfigurationError, match=f"{NAME} is damaged"):
        SafetensorsFile(tmp_path / NAME)


@pytest.mark.parametrize(
    "header",
    [
        [], {"a": 5}, {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1 << 70, 0], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{NAME} is damaged"):
        SafetensorsFile(written(tmp_path / NAME, header, bytes(8)))


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 2) + b"{"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"{NAME} is damaged"):
        SafetensorsFile(tmp_path / NAME)


def test_a_type_that_is_not_supported_is_refused_when_it_is_read(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]},
    }
    file = SafetensorsFile(written(tmp_path / NAME, header, bytes([1, 2, 3, 4])))
    assert file.read("b").tolist() == [3, 4]
    with pytest.raises(ConfigurationError, match="stored as F4"):
        file.read("a")


def test_files_that_are_not_needed_any_more_are_closed(tmp_path: Path) -> None:
    path = saved(tmp_path, a=torch.ones(3))
    file = SafetensorsFile(path)
    assert path in opened()
    del file
    gc.collect()
    assert path not in opened()


def opened() -> list[Path]:
    descriptors = Path("/proc/self/fd")
    return [Path(os.readlink(each)) for each in descriptors.iterdir() if each.is_symlink()]
