"""Bytes in memory that other processes of the same host copy, instead of having them sent.

The memory is a file that is in no directory (memfd_create), sealed once it is written. Readers open it as a descriptor
of its owner in /proc, which the kernel permits to processes of the same user in the same PID namespace. It frees the
memory when no process has it open any more, also if one was killed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import PermissionDeniedError
from services.worker.engine.host_tier.shared_pages import SharingError
from services.worker.peers.leases import this_host

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_BYTES = 16
_PREFIX = "pando-embeddings-"
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class SealedPlace:
    """Where processes of the same space find memory; `name` is that of this memory and no other."""

    name: bytes
    process: int
    descriptor: int


def sharing_space() -> str:
    """Return an identifier that is the same for all processes that may open each other's memory; empty: none may."""
    if sys.platform != "linux" or not _PID_NAMESPACE.exists():
        return ""
    return f"{this_host()}/{_PID_NAMESPACE.stat().st_ino}"


class SealedMemory:
    """Owns memory with bytes that do not change."""

    def __init__(self, content: bytes | memoryview) -> None:
        """Copy `content`, one byte or more.

        Raises:
            SharingError: there is no such memory, or no more descriptors.
        """
        if sys.platform != "linux":
            raise SharingError("only Linux has memory that can be shared like this")
        name, self.size = secrets.token_bytes(NAME_BYTES), len(content)
        try:
            descriptor = os.memfd_create(_PREFIX + name.hex(), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._file = open(descriptor, "rb+", buffering=0)  # noqa: SIM115  (`close` closes it)
        except OSError as error:
            raise SharingError(str(error)) from error
        try:
            os.fchmod(descriptor, 0o400)
            left = memoryview(content)
            while left:
                left = left[self._file.write(left) :]
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            self._file.close()
            raise SharingError(str(error)) from error
        self.place = SealedPlace(name, os.getpid(), descriptor)

    def parts(self, size: int) -> Iterator[bytes]:
        """Yield the bytes in parts of `size`.

        Raises:
            PermissionDeniedError: the memory was closed meanwhile.
        """
        for first in range(0, self.size, size):
            if self._file.closed:
                raise PermissionDeniedError("the call that kept these embeddings has ended")
            yield os.pread(self._file.fileno(), size, first)

    def close(self) -> None:
        """Free the memory, as soon as no reader has it open."""
        self._file.close()


def copy_sealed(place: SealedPlace, size: int) -> memoryview:
    """Return a copy of another process's memory, which must have `size` bytes. Blocks for the time of copying.

    Raises:
        SharingError: it cannot be opened, or is not the memory of this name and size.
    """
    path = f"/proc/{place.process}/fd/{place.descriptor}"
    try:
        # If the owner has closed it, the descriptor may be another file by now, for which this thread must not wait.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb", buffering=0) as opened:
            found = os.readlink(f"/proc/self/fd/{opened.fileno()}")
            if found != f"/memfd:{_PREFIX}{place.name.hex()} (deleted)":
                raise SharingError("the memory was closed")
            held = os.fstat(opened.fileno()).st_size
            if held != size:
                raise SharingError(f"memory of {held} bytes, not {size}")
            content = np.empty(size, np.uint8).data
            read = 0
            while read < size and (more := os.preadv(opened.fileno(), [content[read:]], read)):
                read += more
    except OSError as error:
        raise SharingError(str(error)) from error
    if read != size:
        raise SharingError(f"{read} bytes of {size} could be read")
    return content
