"""The identity of a checkpoint's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.engine.checkpoints.file_identity import identity_of_files

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, content: bytes | bytearray) -> str:
    path.write_bytes(content)
    return identity_of_files([path])


def test_small_files_count_with_every_byte(tmp_path: Path) -> None:
    content = bytearray(200_000)
    found = {write(tmp_path / "a", content)}
    for place in (0, 77_777, 199_999):
        content[place] ^= 1
        found.add(write(tmp_path / "a", content))
    assert len(found) == 4
    assert write(tmp_path / "b", bytes(content)) in found


def test_large_files_count_with_their_size_and_samples_of_all_parts(tmp_path: Path) -> None:
    size = 64 << 20
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)
    found = {identity_of_files([path])}
    # The first and last bytes, and a run that is longer than the distance of samples.
    for start, stop in ((0, 1), (size - 1, size), (size // 3, size // 3 + (256 << 10))):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"x" * (stop - start))
        found.add(identity_of_files([path]))
    with path.open("ab") as file:
        file.write(b"y")
    assert len({*found, identity_of_files([path])}) == 5


def test_several_files_count_in_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert len({identity_of_files(files) for files in ([one], [two], [one, two], [two, one], [])}) == 5
