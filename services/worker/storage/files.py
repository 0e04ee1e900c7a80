"""Storage in a directory, which several processes and hosts may share."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from services.worker.storage.interface import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from services.worker.storage.interface import Blob

# After a clean-up so much of the limit is in use: a clean-up reads the whole directory, so make it worth its while.
_KEPT_SHARE = 0.9
_TEMPORARY_PREFIX = ".new-"
# No file takes so long to write: its writer died.
_ABANDONED_S = 3600.0
# A longer file holds no page and no snapshot of any model: these take some megabytes, those some hundred.
_LONGEST_BYTES = 1024 * 1024 * 1024
# A file that is no object: it decodes as truncated, and is deleted.
_NO_OBJECT = b""


class FileStorage:
    """Keeps each object in a file of its own, mode 0600; see `Storage`.

    Files appear by renaming, so that no reader sees half of one. Reading one sets its time of change, and when all
    together exceed `max_bytes` the least recently read ones are deleted, those of other writers included.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Use `directory`, which is made if need be.

        Raises:
            StorageError: it cannot be written to.
        """
        self._root = directory
        self._max_bytes = max_bytes
        self._serial = itertools.count()
        self._cleaning = threading.Lock()
        # What there was at the last clean-up, and what this process has written since then.
        self._known_bytes = 0
        with _as_storage_error("cannot use", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._known_bytes = sum(size for _, size, _ in self._scan())
            # On a disk that has become read-only, what is there can still be read.
            if not os.access(directory, os.W_OK | os.X_OK) and not os.statvfs(directory).f_flag & os.ST_RDONLY:
                raise PermissionError("not writable")

    def exists_many(self, names: Sequence[str]) -> list[bool]:
        """Return which files are there."""
        paths = [self._path(name) for name in names]
        with _as_storage_error("cannot look into", self._root):
            return [path.exists() for path in paths]

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Read files."""
        return [self._get(self._path(name)) for name in names]

    def put_many(self, objects: Mapping[str, Blob]) -> None:
        """Write files, then delete others if they have become too many."""
        for name, data in objects.items():
            path = self._path(name)
            with _as_storage_error("cannot write", path):
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._write(path, data)
            self._known_bytes += len(data)
        if self._known_bytes > self._max_bytes:
            self.clean_up()

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete files."""
        for name in names:
            with _as_storage_error("cannot delete", self._path(name)):
                self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def clean_up(self) -> None:
        """Delete what was not read for longest, until the rest is well below the limit; one thread at a time does."""
        if not self._cleaning.acquire(blocking=False):
            return
        try:
            with _as_storage_error("cannot clean up", self._root):
                self._delete_oldest()
        finally:
            self._cleaning.release()

    def _delete_oldest(self) -> None:
        files = sorted(self._scan())
        total = sum(size for _, size, _ in files)
        abandoned = time.time() - _ABANDONED_S
        for changed, size, path in files:
            is_dead = path.name.startswith(_TEMPORARY_PREFIX) and changed < abandoned
            if total <= self._max_bytes * _KEPT_SHARE and not is_dead:
                continue
            path.unlink(missing_ok=True)
            total -= size
        self._known_bytes = total

    def _scan(self) -> Iterator[tuple[float, int, Path]]:
        """Yield every file's time of change, size and path; what others delete meanwhile is passed over."""
        for folder in os.scandir(self._root):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, status.st_size, Path(entry.path)

    def _path(self, name: str) -> Path:
        # 256 folders: keys are random, so all of them grow alike.
        return self._root / name[-2:] / name

    def _get(self, path: Path) -> bytes | None:
        # Others may write to the directory: a link, a pipe or a huge file must not take up this process.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return _NO_OBJECT
            raise StorageError(f"cannot read {path}: {error}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST_BYTES:
                return _NO_OBJECT
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(_LONGEST_BYTES)
            # Not on a read-only disk.
            with contextlib.suppress(OSError):
                os.utime(descriptor)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error}") from error
        finally:
            os.close(descriptor)
        return data

    def _write(self, path: Path, data: Blob) -> None:
        temporary = path.with_name(f"{_TEMPORARY_PREFIX}{os.getpid()}-{threading.get_ident()}-{next(self._serial)}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _as_storage_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what} {path}: {error}") from error
