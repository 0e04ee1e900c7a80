"""Back ends of the storage tier: objects by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# An object: a header and an encrypted page, see `objects.py`.
Blob = bytes | bytearray | memoryview


class StorageError(Exception):
    """The storage cannot be reached, or a call of it has failed."""


class Storage(Protocol):
    """Keeps objects by name, each whole or not at all, as long as it likes.

    Names are at most 128 characters out of `[0-9a-f-]`. Methods block and may be called from several threads at once.
    They try to end within the time limit of the storage, but callers have deadlines of their own. Callers check what
    they read, as anyone may have written it.
    """

    def exists_many(self, names: Sequence[str]) -> list[bool]:
        """Return for each of `names` whether it exists. Raises StorageError."""

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return each object, None where there is none. Raises StorageError."""

    def put_many(self, objects: Mapping[str, Blob]) -> None:
        """Store objects, in place of those with the same names. Raises StorageError."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete those of `names` that exist. Raises StorageError."""

    def close(self) -> None:
        """Close connections."""
