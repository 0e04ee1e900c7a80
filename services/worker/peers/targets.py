"""Where pages of other groups arrive: pages of this rank on the host or on the device."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from common.steps import PageIds
    from services.worker.engine.execution.interface import AfterPasses, PeerPageCopies
    from services.worker.engine.host_tier.page_form import PageForm
    from services.worker.engine.host_tier.shared_pages import MappedPages
    from services.worker.stream_pages import StreamDevicePages, StreamPages


class TargetPages(Protocol):
    """Pages of one tier, [pages] int32 in all methods, as long as a stream of plans is open.

    Methods that write raise StreamEndedError after its end.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""

    @property
    def is_device(self) -> bool:
        """Whether they are on the device."""

    async def until_free(self) -> None:
        """Wait until no pass uses what is about to be overwritten."""

    def can_copy(self, copies: PeerPageCopies, pages: PageIds) -> bool:
        """Whether pages can be copied from memory of other processes."""

    def copy(self, copies: PeerPageCopies, source: MappedPages, pages: PageIds, into: PageIds) -> None:
        """Copy `pages` of memory of another process; see `PeerPageCopies.copy`."""

    def write(self, pages: PageIds, content: memoryview) -> None:
        """Overwrite pages with content, one page after the other."""

    def write_snapshot(self, snapshot: int, content: memoryview) -> None:
        """Overwrite a snapshot of recurrent states; only of the device."""


@dataclass(frozen=True, slots=True)
class HostTarget:
    """Pages of the host tier; see `TargetPages`."""

    pages: StreamPages

    @property
    def page_bytes(self) -> int:
        return self.pages.page_bytes

    @property
    def is_device(self) -> bool:
        return False

    async def until_free(self) -> None:
        """Return at once: passes use no pages of the host."""

    def can_copy(self, copies: PeerPageCopies, pages: PageIds) -> bool:
        return copies.can_write(pages)

    def copy(self, copies: PeerPageCopies, source: MappedPages, pages: PageIds, into: PageIds) -> None:
        with self.pages.kept_open():
            copies.copy(source, pages, into)

    def write(self, pages: PageIds, content: memoryview) -> None:
        size = self.page_bytes
        for index, page in enumerate(pages.tolist()):
            self.pages.write_page(page, content[index * size : (index + 1) * size])

    def write_snapshot(self, snapshot: int, content: memoryview) -> None:
        raise AssertionError("the engine lets snapshots of peers arrive on the device only")


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """Pages of the device, which the passes of `after` may still read, if there are any; see `TargetPages`."""

    pages: StreamDevicePages
    after: AfterPasses | None

    @property
    def page_bytes(self) -> int:
        return self.pages.page_bytes

    @property
    def is_device(self) -> bool:
        return True

    async def until_free(self) -> None:
        if self.after is not None:
            await asyncio.to_thread(self.after)

    def can_copy(self, copies: PeerPageCopies, pages: PageIds) -> bool:
        return True

    def copy(self, copies: PeerPageCopies, source: MappedPages, pages: PageIds, into: PageIds) -> None:
        with self.pages.kept_open():
            copies.copy_to_device(source, pages, into)

    def write(self, pages: PageIds, content: memoryview) -> None:
        self.pages.write_pages(pages, content)

    def write_snapshot(self, snapshot: int, content: memoryview) -> None:
        self.pages.write_snapshot(snapshot, content)


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """The pages of rank `rank` of `ranks`, which have the form `form`."""

    pages: TargetPages
    rank: int
    ranks: int
    form: PageForm
    # From memory of other processes to these pages; None: there are none.
    copies: PeerPageCopies | None = None
