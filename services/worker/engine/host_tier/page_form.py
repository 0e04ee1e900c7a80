"""Where the KV heads of a page lie in its bytes, so that ranks with other heads can read parts of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from services.worker.engine.parallel.shards import Span, split_kv_heads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PageForm:
    """A rank's pages: some number of times its heads one after the other, each of some bytes.

    `parts` are these two numbers, for each run of layers that are alike. `held` are the rank's heads among the model's
    `total`. With latent attention there is one, which all ranks hold. With recurrent layers, `snapshot` is the form of
    a snapshot of their states, by their key heads.
    """

    parts: tuple[tuple[int, int], ...]
    held: Span
    total: int
    snapshot: PageForm | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this rank."""
        return self.bytes_of(self.held)

    def bytes_of(self, heads: Span) -> int:
        """Return the bytes of some heads in one page."""
        return sum(runs * len(heads) * head_bytes for runs, head_bytes in self.parts)

    def holds(self, heads: Span) -> bool:
        """Whether this rank has all of these heads, of which there is at least one."""
        return self.held.start <= heads.start < heads.stop <= self.held.stop

    def cut(self, pages: bytes, heads: Span) -> bytes:
        """Return the bytes of some heads in each of `pages`."""
        if heads == self.held:
            return pages
        of_heads = replace(self, held=heads)
        content = np.empty(len(pages) // self.page_bytes * of_heads.page_bytes, np.uint8)
        for into, part in zip(of_heads._views(content, heads), self._views(_array(pages), heads), strict=True):
            into[:] = part
        return content.tobytes()

    def join(self, parts: Sequence[tuple[Span, memoryview]]) -> memoryview:
        """Return whole pages of this rank, of which each part has some heads; together they have each once."""
        if len(parts) == 1 and parts[0][0] == self.held:
            return parts[0][1]
        count = len(parts[0][1]) // self.bytes_of(parts[0][0])
        pages = np.empty(count * self.page_bytes, np.uint8)
        for heads, content in parts:
            of_heads = replace(self, held=heads)._views(_array(content), heads)
            for into, part in zip(self._views(pages, heads), of_heads, strict=True):
                into[:] = part
        return memoryview(pages.data)

    def _views(self, pages: NDArray[np.uint8], heads: Span) -> Iterator[NDArray[np.uint8]]:
        """Yield a view of some heads in each part, [pages, runs, heads, bytes]."""
        rows, first, end = pages.reshape(-1, self.page_bytes), heads.start - self.held.start, 0
        for runs, head_bytes in self.parts:
            start, end = end, end + runs * len(self.held) * head_bytes
            part = rows[:, start:end].reshape(len(rows), runs, len(self.held), head_bytes)
            yield part[:, :, first : first + len(heads)]


def _array(content: bytes | memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8)


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
