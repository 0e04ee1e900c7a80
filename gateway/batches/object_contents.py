"""Contents of files as objects in a store that fsspec knows: S3, Google Cloud Storage, a mounted directory."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from common.errors import ConfigurationError, UnavailableError
from common.logs import get_logger
from gateway.batches.contents import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.batches.contents import ContentWriter

T = TypeVar("T")

# Calls that run at the same time, and the seconds that one may take.
CALLS: Final = 8
CALL_S: Final = 60.0
RETRY_AFTER_MS: Final = 5000
UNAVAILABLE: Final = "The store of the files' contents is not available now; try again soon."


class ObjectContents:
    """Implements `gateway.batches.contents.FileContents` with one object for each file.

    An object appears as a whole when it is finished, and names of files cannot be guessed. Stores answer with errors of
    their own libraries, which all count as an outage, except that there is no such object.
    """

    def __init__(self, url: str) -> None:
        """Keep objects below `url`, for example s3://bucket/prefix; the store is not asked yet.

        Raises:
            ConfigurationError: the URL's protocol is unknown, or its library is not installed.
        """
        try:
            import fsspec
            import fsspec.implementations.local

            filesystem, prefix = fsspec.url_to_fs(url)
        except ImportError as error:
            raise ConfigurationError(
                f"gateway.batches.object_store {url}: {error}: pip install '.[object-stores]' in Pando's repository"
            ) from error
        except ValueError as error:
            raise ConfigurationError(f"gateway.batches.object_store {url}: {error}") from error
        self._store = _Store(filesystem)
        self._prefix = prefix.rstrip("/")
        self._is_local = isinstance(filesystem, fsspec.implementations.local.LocalFileSystem)

    def writer(self, file_id: str) -> ContentWriter:
        path = self._path(file_id)
        return _RenamedWriter(self._store, path) if self._is_local else _ObjectWriter(self._store, path)

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield the content in pieces."""
        try:
            opened = await self._store.call(lambda files: files.open(self._path(file_id), "rb"))
        except FileNotFoundError:
            return
        try:
            while piece := await self._store.call(lambda _: opened.read(PIECE_BYTES)):
                yield piece
        finally:
            with contextlib.suppress(UnavailableError):
                await self._store.call(lambda _: opened.close())

    async def delete(self, file_id: str) -> None:
        """Delete an object, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            await self._store.call(lambda files: files.rm_file(self._path(file_id)))

    async def close(self) -> None:
        """End the threads once their calls have ended."""
        self._store.close()

    def _path(self, file_id: str) -> str:
        return f"{self._prefix}/{file_id}"


class _Store:
    """A file system of fsspec, called in threads of its own."""

    def __init__(self, filesystem: Any) -> None:  # Any: fsspec has no types
        self._filesystem = filesystem
        self._threads = ThreadPoolExecutor(CALLS, "object-store")
        self._log = get_logger("batches")

    async def call(self, work: Callable[[Any], T]) -> T:
        """Run `work` on the file system.

        Raises:
            FileNotFoundError: there is no such object.
            UnavailableError: anything else went wrong, or it took too long.
        """
        try:
            async with asyncio.timeout(CALL_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, self._filesystem)
        except FileNotFoundError:
            raise
        except Exception as error:
            # Messages of other libraries may repeat what was sent.
            self._log.error("batches.object_store_failed", reason=type(error).__name__)
            raise UnavailableError(UNAVAILABLE, retry_after_ms=RETRY_AFTER_MS) from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _ObjectWriter:
    """Writes an object, which is an open upload in parts until it is committed."""

    def __init__(self, store: _Store, path: str) -> None:
        self.size = 0
        self._store = store
        self._path = path
        self._file: Any = None  # Any: fsspec has no types
        self._is_committed = False

    async def write(self, content: bytes) -> None:
        """Append `content`."""
        file = await self._opened()
        await self._store.call(lambda _: file.write(content))
        self.size += len(content)

    async def finish(self) -> None:
        """Let the object appear."""
        await self._opened()
        await self._store.call(self._commit)
        self._is_committed = True

    async def discard(self) -> None:
        """Drop the upload, unless it is finished."""
        # The outage that the content is discarded for may last.
        with contextlib.suppress(FileNotFoundError, UnavailableError):
            if self._file is not None and not self._is_committed:
                await self._store.call(self._drop)

    async def _opened(self) -> Any:  # Any: fsspec has no types
        if self._file is None:
            self._file = await self._store.call(self._open)
        return self._file

    def _open(self, files: Any) -> Any:  # Any: fsspec has no types
        return files.open(self._path, "wb", autocommit=False)

    def _commit(self, _files: Any) -> None:  # Any: fsspec has no types
        self._file.close()
        self._file.commit()

    def _drop(self, _files: Any) -> None:  # Any: fsspec has no types
        self._file.discard()


class _RenamedWriter(_ObjectWriter):
    """Writes a file beside its place in a directory, and renames it."""

    def __init__(self, store: _Store, path: str) -> None:
        super().__init__(store, path)
        # Another gateway may write the same content.
        self._part = f"{path}.{secrets.token_hex(8)}.part"

    def _open(self, files: Any) -> Any:  # Any: fsspec has no types
        files.makedirs(files._parent(self._path), exist_ok=True)
        return files.open(self._part, "wb")

    def _commit(self, files: Any) -> None:  # Any: fsspec has no types
        self._file.close()
        files.mv(self._part, self._path)

    def _drop(self, files: Any) -> None:  # Any: fsspec has no types
        self._file.close()
        files.rm_file(self._part)
