"""Where the KV heads of a page lie in its bytes, so that ranks with other heads can read parts of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.worker.engine.parallel.shards import Span, split_kv_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PageForm:
    """A rank's pages: `runs` times its heads one after the other, each of `head_bytes` bytes.

    `held` are the rank's heads among the model's `total`. With latent attention there is one, which all ranks hold.
    """

    runs: int
    head_bytes: int
    held: Span
    total: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this rank."""
        return self.bytes_of(self.held)

    def bytes_of(self, heads: Span) -> int:
        """Return the bytes of some heads in one page."""
        return self.runs * len(heads) * self.head_bytes

    def holds(self, heads: Span) -> bool:
        """Whether this rank has all of these heads, of which there is at least one."""
        return self.held.start <= heads.start < heads.stop <= self.held.stop

    def cut(self, pages: bytes, heads: Span) -> bytes:
        """Return the bytes of some heads in each of `pages`."""
        if heads == self.held:
            return pages
        content: bytes = self._view(np.frombuffer(pages, np.uint8), heads).tobytes()
        return content

    def join(self, parts: Sequence[tuple[Span, memoryview]]) -> memoryview:
        """Return whole pages of this rank, of which each part has some heads; together they have each once."""
        if len(parts) == 1 and parts[0][0] == self.held:
            return parts[0][1]
        count = len(parts[0][1]) // self.bytes_of(parts[0][0])
        pages = np.empty(count * self.page_bytes, np.uint8)
        for heads, content in parts:
            shape = (count, self.runs, len(heads), self.head_bytes)
            self._view(pages, heads)[:] = np.frombuffer(content, np.uint8).reshape(shape)
        return memoryview(pages.data)

    def _view(self, pages: NDArray[np.uint8], heads: Span) -> NDArray[np.uint8]:
        """Return a view of some heads, [pages, runs, heads, bytes]."""
        first = heads.start - self.held.start
        return pages.reshape(-1, self.runs, len(self.held), self.head_bytes)[:, :, first : first + len(heads)]


def sources_of(form: PageForm, rank: int, ranks: int, peers: int) -> list[tuple[int, Span]]:
    """Return from which of a group's `peers` ranks `rank`, one of `ranks`, reads which of its heads, each once.

    Of as many ranks, each reads from its like, which has the same layers. Where several ranks hold a head, not all read
    from the same one.
    """
    if ranks == peers:
        return [(rank, form.held)]
    held = [split_kv_heads(form.total, peer, peers) for peer in range(peers)]
    sources = []
    at = form.held.start
    while at < form.held.stop:
        holders = [peer for peer, heads in enumerate(held) if heads.start <= at < heads.stop]
        peer = holders[rank % len(holders)]
        heads = Span(at, min(form.held.stop, held[peer].stop))
        sources.append((peer, heads))
        at = heads.stop
    return sources
