"""Pages of host and device as long as one stream of plans is open."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import PageIds
    from services.worker.engine.execution.interface import DevicePageBytes, HostPageBytes


class StreamEndedError(Exception):
    """The stream of plans is over: its pages hold something else by now."""


class _OfStream:
    """Memory of one stream of plans. Methods belong to no thread.

    Once `close` has returned, no page is read or written any more, however late an answer of storage or a peer comes.
    """

    def __init__(self) -> None:
        self._is_closed = False
        self._users = 0
        self._changed = threading.Condition()

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


class StreamPages(_OfStream):
    """The host pages of one stream of plans."""

    def __init__(self, pages: HostPageBytes) -> None:
        """Read and write `pages`."""
        super().__init__()
        self._pages = pages

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

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot of recurrent states; 0 without any."""
        return 0 if self._pages.states is None else self._pages.states.slot_bytes

    def read_state(self, slot: int) -> bytes:
        """Return a copy of a snapshot's bytes.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        assert self._pages.states is not None, "there are snapshots"
        with self.kept_open():
            return self._pages.states.read(slot)

    def write_state(self, slot: int, content: memoryview) -> None:
        """Overwrite a snapshot with `state_bytes` bytes.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        assert self._pages.states is not None, "there are snapshots"
        with self.kept_open():
            self._pages.states.write(slot, content)


class StreamDevicePages(_OfStream):
    """The device pages and snapshots of one stream of plans, for writes of what arrives from peers."""

    def __init__(self, pages: DevicePageBytes) -> None:
        """Write `pages`."""
        super().__init__()
        self._pages = pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._pages.form.page_bytes

    def write_pages(self, pages: PageIds, content: memoryview) -> None:
        """Overwrite pages; see `DevicePageBytes.write_pages`.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        with self.kept_open():
            self._pages.write_pages(pages.tolist(), content)

    def write_snapshot(self, snapshot: int, content: memoryview) -> None:
        """Overwrite a snapshot; see `SnapshotBytes.write`.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        assert self._pages.snapshots is not None, "the engine has checked that there are snapshots"
        with self.kept_open():
            self._pages.snapshots.write(snapshot, content)
