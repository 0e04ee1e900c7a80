from __future__ import annotations

import errno
import os
import stat
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from services.worker.storage.files import FileStorage
from services.worker.storage.interface import StorageError

if TYPE_CHECKING:
    from pathlib import Path


def name(number: int) -> str:
    return f"{7:016x}-{number:064x}"


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_stored_objects_are_read_back_and_found(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "new" / "place", 1000)
    storage.put_many({name(1): b"one", name(2): b"two"})
    assert storage.get_many([name(1), name(2), name(3)]) == [b"one", b"two", None]
    assert storage.exists_many([name(3), name(2)]) == [False, True]


def test_another_instance_finds_stored_objects(tmp_path: Path) -> None:
    FileStorage(tmp_path, 1000).put_many({name(1): b"one"})
    assert FileStorage(tmp_path, 1000).get_many([name(1)]) == [b"one"]


def test_deleted_objects_are_gone_and_others_are_kept(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, 1000)
    storage.put_many({name(1): b"one", name(2): b"two"})
    storage.delete_many([name(1), name(3)])
    assert storage.get_many([name(1), name(2)]) == [None, b"two"]


def test_stored_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    FileStorage(tmp_path / "place", 1000).put_many({name(1): b"one"})
    paths = [tmp_path / "place", *(tmp_path / "place").rglob("*")]
    assert len(paths) == 3
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths)


def test_objects_spread_over_folders(tmp_path: Path) -> None:
    FileStorage(tmp_path, 10_000).put_many({name(number): b"x" for number in range(64)})
    assert len(list(tmp_path.iterdir())) == 64


def test_the_limit_holds_and_the_least_recently_read_files_are_evicted(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, 1000)
    for number in range(9):
        storage.put_many({name(number): bytes(100)})
        os.utime(tmp_path / name(number)[-2:] / name(number), (number, number))
    storage.get_many([name(0)])  # the oldest, but now read
    storage.put_many({name(10): bytes(100), name(11): bytes(100)})
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1000
    assert storage.exists_many([name(0), name(1), name(10), name(11)]) == [True, False, True, True]


def test_the_limit_includes_files_written_by_others(tmp_path: Path) -> None:
    FileStorage(tmp_path, 10_000).put_many({name(number): bytes(100) for number in range(20)})
    storage = FileStorage(tmp_path, 1000)
    storage.put_many({name(30): bytes(100)})
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1000
    assert storage.exists_many([name(30)]) == [True]


def test_a_write_that_failed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FileStorage(tmp_path, 1000)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(StorageError, match="No space left"):
        storage.put_many({name(1): b"one"})
    assert files(tmp_path) == []


def test_files_whose_writer_died_are_cleaned_up(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, 1000)
    storage.put_many({name(1): b"one"})
    dead = tmp_path / name(1)[-2:] / ".new-1-2-3"
    dead.write_bytes(b"half")
    os.utime(dead, (1, 1))
    storage.clean_up()
    assert not dead.exists()
    assert storage.exists_many([name(1)]) == [True]


def test_a_storage_path_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use"):
        FileStorage(tmp_path / "file", 1000)


@pytest.mark.parametrize("is_disk", [True, False])
def test_a_read_only_disk_can_be_read_and_a_directory_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_disk: bool
) -> None:
    FileStorage(tmp_path, 1000).put_many({name(1): b"one"})

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    flags = os.statvfs(tmp_path).f_flag | (os.ST_RDONLY if is_disk else 0)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    if is_disk:
        assert FileStorage(tmp_path, 1000).get_many([name(1)]) == [b"one"]
    else:
        with pytest.raises(StorageError, match="not writable"):
            FileStorage(tmp_path, 1000)


def test_a_directory_that_vanishes_fails_clearly_or_is_a_miss(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "place", 1000)
    storage.put_many({name(1): b"one"})
    for path in files(tmp_path):
        path.unlink()
        path.parent.rmdir()
    (tmp_path / "place").rmdir()
    assert storage.get_many([name(1)]) == [None]
    with pytest.raises(StorageError, match="cannot write"):
        storage.put_many({name(1): b"one"})


def test_readers_never_see_half_of_an_object(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, 1 << 30)
    blobs = [bytes([fill]) * 100_000 for fill in range(2)]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for blob in blobs:
                storage.put_many({name(1): blob})

    writer = threading.Thread(target=write)
    storage.put_many({name(1): blobs[0]})
    writer.start()
    try:
        assert all(storage.get_many([name(1)])[0] in blobs for _ in range(200))
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("kind", ["huge", "pipe", "link"])
def test_a_file_that_is_no_object_is_neither_waited_for_nor_read_into_memory(tmp_path: Path, kind: str) -> None:
    storage = FileStorage(tmp_path / "place", 1000)
    storage.put_many({name(1): b"one"})
    [path] = files(tmp_path)
    path.unlink()
    match kind:
        case "huge":
            with path.open("wb") as file:
                file.truncate(2**40)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to("/dev/zero")
    assert storage.get_many([name(1)]) == [b""]
    storage.delete_many([name(1)])
    storage.put_many({name(1): b"one"})
    assert storage.get_many([name(1)]) == [b"one"]
