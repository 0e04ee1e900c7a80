"""Contents of files: pieces among the documents, or objects in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.batches.documents import Documents

PIECE_BYTES = 256 * 1024


class ContentWriter(Protocol):
    """Writes the content of one file, which can be read once it is finished.

    Raises:
        UnavailableError: from every method: the storage is unavailable.
    """

    @property
    def size(self) -> int:
        """Number of bytes written."""

    async def write(self, content: bytes) -> None:
        """Append `content`."""

    async def finish(self) -> None:
        """Make what was written readable."""

    async def discard(self) -> None:
        """Drop what was written if it is not finished; an outage leaves unused bytes behind."""


class FileContents(Protocol):
    """Contents by the ids of their files.

    Raises:
        UnavailableError: from every method: the storage is unavailable.
    """

    def writer(self, file_id: str) -> ContentWriter:
        """Return a writer; the content replaces that of an earlier one for the same file."""

    def read(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield a content in pieces; nothing if there is none."""

    async def delete(self, file_id: str) -> None:
        """Delete a content, if there is one."""

    async def close(self) -> None:
        """Release what the contents hold; the documents stay open."""


class DocumentContents:
    """Implements `FileContents` with a folder of documents for each file, one for each piece."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def writer(self, file_id: str) -> ContentWriter:
        return _PieceWriter(self._documents, _folder(file_id))

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        folder = _folder(file_id)
        for name in await self._documents.names(folder):
            piece = await self._documents.get(folder, name)
            if piece is None:  # deleted meanwhile
                return
            yield piece

    async def delete(self, file_id: str) -> None:
        await self._documents.delete(_folder(file_id))

    async def close(self) -> None:
        """Do nothing."""


class _PieceWriter:
    def __init__(self, documents: Documents, folder: str) -> None:
        self.size = 0
        self._documents = documents
        self._folder = folder
        self._number = 0
        self._rest = bytearray()

    async def write(self, content: bytes) -> None:
        self.size += len(content)
        self._rest += content
        while len(self._rest) >= PIECE_BYTES:
            await self._put(bytes(self._rest[:PIECE_BYTES]))
            del self._rest[:PIECE_BYTES]

    async def finish(self) -> None:
        if self._rest:
            await self._put(bytes(self._rest))
            self._rest.clear()

    async def discard(self) -> None:
        """Do nothing: another gateway may write the same content meanwhile, and the next writer drops the rest."""

    async def _put(self, piece: bytes) -> None:
        if not self._number:
            await self._documents.delete(self._folder)
        await self._documents.put(self._folder, f"{self._number:08d}", piece)
        self._number += 1


def _folder(file_id: str) -> str:
    return f"content:{file_id}"
