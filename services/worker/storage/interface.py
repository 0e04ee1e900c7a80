"""What the storage tier is built on: a place for bytes by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What is kept: a header and an encrypted page, see `objects.py`.
Blob = bytes | bytearray | memoryview


class StorageError(Exception):
    """The place cannot be reached, or does not do what it was asked for."""


class Storage(Protocol):
    """Keeps objects by name, each whole or not at all, as long as it likes.

    Names are at most 128 characters out of `[0-9a-f-]`. Methods block and may be called from several threads at once.
    They try to end within the time limit the storage was made with, but whoever calls them waits no longer than it
    wants to. What is read may be anything: whoever reads checks.
    """

    def exists_many(self, names: Sequence[str]) -> list[bool]:
        """Return which of `names` are there. Raises StorageError."""

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return each object, None where there is none. Raises StorageError."""

    def put_many(self, objects: Mapping[str, Blob]) -> None:
        """Keep objects, in place of those that have the names already. Raises StorageError."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Drop what there is of `names`. Raises StorageError."""

    def close(self) -> None:
        """Let go of connections."""
