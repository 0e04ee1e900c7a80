"""A storage in memory that can be told to fail, to be slow and to answer with anything."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.worker.storage.interface import StorageError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from services.worker.storage.interface import Blob


@dataclass
class FakeStorage:
    """Objects by name. `is_down`: every call fails; `gate`: calls wait until it is set.

    `room`: so many more objects can be written, and then writes fail as on a full disk. `refuses_deletions`: deletions
    fail. `written`: all names that were written, in order.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    is_down: bool = False
    gate: threading.Event | None = None
    calls: list[str] = field(default_factory=list)
    is_closed: bool = False
    room: int | None = None
    refuses_deletions: bool = False
    written: list[str] = field(default_factory=list)

    def exists_many(self, names: Sequence[str]) -> list[bool]:
        self._call("exists")
        return [name in self.objects for name in names]

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        self._call("get")
        return [self.objects.get(name) for name in names]

    def put_many(self, objects: Mapping[str, Blob]) -> None:
        self._call("put")
        for name, data in objects.items():
            if self.room is not None:
                if not self.room:
                    raise StorageError(f"cannot write {name}: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}")
                self.room -= 1
            self.objects[name] = bytes(data)
            self.written.append(name)

    def delete_many(self, names: Sequence[str]) -> None:
        self._call("delete")
        if self.refuses_deletions:
            raise StorageError(f"cannot delete: {OSError(errno.EROFS, os.strerror(errno.EROFS))}")
        for name in names:
            self.objects.pop(name, None)

    def close(self) -> None:
        self.is_closed = True

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.gate is not None:
            self.gate.wait(timeout=30)
        if self.is_down:
            raise StorageError("told to fail")


@dataclass
class FakeHostStates:
    """Snapshots of recurrent states as a list of bytes."""

    slot_bytes: int
    contents: list[bytes]

    @property
    def slots(self) -> int:
        return len(self.contents)

    def read(self, slot: int) -> bytes:
        return self.contents[slot]

    def write(self, slot: int, content: memoryview) -> None:
        assert len(content) == self.slot_bytes
        self.contents[slot] = bytes(content)


@dataclass
class FakeHostPages:
    """Host pages as a list of bytes."""

    page_bytes: int
    pages: list[bytes]
    states: FakeHostStates | None = None

    def read_page(self, page: int) -> bytes:
        return self.pages[page]

    def write_page(self, page: int, content: memoryview) -> None:
        assert len(content) == self.page_bytes
        self.pages[page] = bytes(content)
