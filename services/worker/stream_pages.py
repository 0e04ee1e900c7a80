"""Host pages as long as one stream of plans is open."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.execution.interface import HostPageBytes


class StreamEndedError(Exception):
    """The stream of plans is over: the host pages hold something else by now."""


class StreamPages:
    """The host pages of one stream of plans. Its methods belong to no thread.

    Once `close` has returned, no page is read or written any more, however late an answer of storage or a peer comes.
    """

    def __init__(self, pages: HostPageBytes) -> None:
        """Read and write `pages`."""
        self._pages = pages
        self._is_closed = False
        self._users = 0
        self._changed = threading.Condition()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._pages.page_bytes

    def read_page(self, page: int) -> bytes:
        """Return a copy of a page's bytes.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        with self.kept_open():
            return self._pages.read_page(page)

    def write_page(self, page: int, content: memoryview) -> None:
        """Overwrite a page with `page_bytes` bytes.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        with self.kept_open():
            self._pages.write_page(page, content)

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Let `close` wait for the end of a use of the pages, which takes milliseconds.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        with self._changed:
            if self._is_closed:
                raise StreamEndedError
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let no page be touched from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._users)
