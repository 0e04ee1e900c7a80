"""A small file system that can be filled, made read-only and damaged, for the files that services keep."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MEGABYTES = 8
BLOCK = bytes(1 << 12)
RELEASE_S = 5.0


class NoDiskError(Exception):
    """File systems cannot be mounted here: it takes root."""


class Disk:
    """A file system in memory, mounted at `path` until `close`."""

    def __init__(self, path: Path) -> None:
        """Mount it.

        Raises:
            NoDiskError: that is not permitted.
        """
        path.mkdir()
        path.chmod(0o700)
        self.path = path
        self._ballast = path / "ballast"
        self._mount("-t", "tmpfs", "-o", f"size={MEGABYTES}m,mode=0700", "none", str(path))

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """Leave no room within the block."""
        await asyncio.to_thread(self._fill)
        try:
            yield
        finally:
            self._ballast.unlink()

    @asynccontextmanager
    async def read_only(self) -> AsyncIterator[None]:
        """Refuse writes within the block, which begins once no process has a file open for writing.

        Raises:
            TimeoutError: a process keeps one open.
        """
        async with asyncio.timeout(RELEASE_S):
            while not self._remount("ro"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        try:
            yield
        finally:
            self._remount("rw")

    def damage(self, name: str) -> None:
        """Overwrite a file with bytes that mean nothing."""
        path = self.path / name
        with path.open("r+b") as file:
            file.write(b"damaged!" * max(1, path.stat().st_size // 8))

    def close(self) -> None:
        """Unmount it, also if files are still open."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)

    def _fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(BLOCK)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def _remount(self, mode: str) -> bool:
        done = subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], check=False, capture_output=True)
        return done.returncode == 0

    @staticmethod
    def _mount(*arguments: str) -> None:
        if os.geteuid() != 0:
            raise NoDiskError("mounting a file system takes root")
        done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
        if done.returncode:
            raise NoDiskError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
