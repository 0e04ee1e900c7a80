"""A rank's host pages as storage sees them, as long as one stream of plans lasts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from services.worker.storage.objects import Miss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.worker.engine.execution.interface import HostPageBytes
    from services.worker.storage.interface import Blob
    from services.worker.storage.objects import ObjectFormat


class ShardClosedError(Exception):
    """The stream of plans is over: the host pages hold something else by now."""


class Shard:
    """Turns host pages into objects and back. Its methods belong to no thread.

    Once `close` has returned, no page is read or written any more, however late an answer of the back end comes.
    """

    def __init__(self, pages: HostPageBytes, form: ObjectFormat) -> None:
        """Read and write `pages` as objects of the form `form`."""
        self._pages = pages
        self._form = form
        self._is_closed = False
        self._lock = threading.Lock()

    def names(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of this rank's objects."""
        return [self._form.name(key) for key in keys]

    def dump(self, pages: Mapping[bytes, int], cipher_key: bytes) -> dict[str, Blob]:
        """Return the objects to write for host pages by storage key, by name.

        Raises:
            ShardClosedError: the shard has been closed.
        """
        objects: dict[str, Blob] = {}
        for key, page in pages.items():
            with self._lock:
                self._check_open()
                content = self._pages.read_page(page)
            objects[self._form.name(key)] = self._form.encode(key, cipher_key, content)
        return objects

    def load(
        self, keys: Sequence[bytes], cipher_key: bytes, blobs: Sequence[bytes | None], pages: Sequence[int]
    ) -> list[Miss | None]:
        """Decrypt what was read and write it to host pages, up to the first page that cannot be had.

        Returns:
            The outcomes, in order: None for a page that was loaded; a miss is the last.

        Raises:
            ShardClosedError: the shard has been closed.
        """
        outcomes: list[Miss | None] = []
        for key, blob, page in zip(keys, blobs, pages, strict=True):
            payload = Miss.MISSING if blob is None else self._form.decode(key, cipher_key, blob)
            if isinstance(payload, Miss):
                outcomes.append(payload)
                break
            with self._lock:
                self._check_open()
                self._pages.write_page(page, payload)
            outcomes.append(None)
        return outcomes

    def close(self) -> None:
        """Let no page be touched from now on."""
        with self._lock:
            self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShardClosedError
