"""Storage of files and batches: documents in folders, in SQLite or in the server that several gateways share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Documents(Protocol):
    """Documents by folder and name. Each call is atomic.

    Raises:
        UnavailableError: from every method: the storage is unavailable.
    """

    async def get(self, folder: str, name: str) -> bytes | None:
        """Return a document, None if there is none."""

    async def get_many(self, folder: str, names: Sequence[str]) -> list[bytes | None]:
        """Return several documents of a folder; None for each that does not exist."""

    async def names(self, folder: str) -> list[str]:
        """Return the names of a folder's documents, sorted."""

    async def put(self, folder: str, name: str, content: bytes) -> None:
        """Write a document."""

    async def exchange(self, folder: str, name: str, expected: bytes | None, content: bytes | None) -> bool:
        """Replace a document if its content is `expected`; return whether it was.

        None stands for no document: an `expected` of None creates it, a `content` of None deletes it.
        """

    async def delete(self, folder: str, name: str | None = None) -> None:
        """Delete a document, or a whole folder."""

    async def close(self) -> None:
        """Release the storage; nothing may be called afterwards."""
