"""The campaign's disk can be filled, made read-only and damaged; it takes root to mount it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.chaos.disks import BLOCK, Disk, NoDiskError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path / "disk")
    except NoDiskError as error:
        pytest.skip(str(error))
    yield disk
    disk.close()


async def test_a_full_disk_has_room_again_afterwards(disk: Disk) -> None:
    async with disk.full():
        with pytest.raises(OSError, match="No space") as raised:
            (disk.path / "file").write_bytes(BLOCK)
        assert raised.value.errno == errno.ENOSPC
    (disk.path / "file").write_bytes(BLOCK)


async def test_a_read_only_disk_can_be_read(disk: Disk) -> None:
    (disk.path / "file").write_text("kept")
    async with disk.read_only():
        assert (disk.path / "file").read_text() == "kept"
        with pytest.raises(OSError, match="Read-only") as raised:
            (disk.path / "other").write_text("lost")
        assert raised.value.errno == errno.EROFS
    (disk.path / "other").write_text("kept")


async def test_a_damaged_file_keeps_its_length(disk: Disk) -> None:
    (disk.path / "file").write_bytes(bytes(4096))
    disk.damage("file")
    assert (disk.path / "file").read_bytes() == b"damaged!" * 512
