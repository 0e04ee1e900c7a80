"""The record of a lease's pages, and a lease whose workers are lost while they grant pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from common.errors import UnavailableError
from services.scheduler.disaggregation.prefill_server import PrefillServer
from tests.services.scheduler.core.harness import Harness
from tests.services.scheduler.core.test_images import CAT, TEXT, ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.disaggregation.prefill_server import PrefillPart

# Four whole pages, and a tail: the image ends on the last page, which the prompt does not fill.
PARTS = (TEXT, (CAT, 15), [14, 15])
PAGES = 5


class Rank:
    """Grants pages, and does something else before it answers."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.granted: list[int] = []
        self._then = then

    async def grant_pages(self, _lease: bytes, pages: tuple[int, ...], _snapshots: tuple[object, ...]) -> None:
        self.granted += pages
        self._then()

    async def revoke_pages(self, _lease: bytes) -> None:
        pass


class Loop(SimpleNamespace):
    """The loop of a prefill group, whose clock is that of its core."""

    @property
    def now(self) -> float:
        harness: Harness = self.harness
        return harness.now


class Lender:
    """A prefill group that is asked for one prompt, and has computed all of it before it grants any page."""

    def __init__(self, then: Callable[[Harness], None] = lambda _harness: None) -> None:
        self.harness = Harness(cache="user_aware")
        self.ranks = [Rank(lambda: then(self.harness)), Rank(lambda: None)]
        loop: Any = Loop(
            harness=self.harness, core=self.harness.core, capacity=MagicMock(), wake=lambda: None,
            abort=self.harness.core.abort,
            submit_prefill=lambda request, follower: self.harness.core.submit(request, self.harness.now, follower),
        )  # fmt: skip
        self.calls = PrefillServer(loop, MagicMock(ranks=self.ranks), ["one", "other"]).serve(ask("one", *PARTS))

    async def last_part(self) -> PrefillPart:
        """Return the message that offers all pages."""
        async for part in self.calls:
            if part.is_last:
                return part
            self.harness.run()
        raise AssertionError("no last part")


async def test_all_pages_that_the_workers_grant_are_noted_as_lent() -> None:
    lender = Lender()
    part = await lender.last_part()
    exports = lender.harness.core.exports
    assert len(set(part.pages)) == PAGES
    assert [rank.granted for rank in lender.ranks] == [list(part.pages)] * 2
    # A page is found missing only if it was noted.
    exports.release(part.lease)
    lender.harness.core.memory.flush()
    name = part.lease.hex()
    assert sorted(exports.lent.faults(1)) == sorted(f"page {page} of lease {name} is free" for page in part.pages)
    await lender.calls.aclose()


async def test_no_tail_is_lent_of_workers_that_were_lost_while_they_granted_the_pages_before() -> None:
    """The ranks that connect next have other pages of the same numbers."""
    lender = Lender(lambda harness: harness.lose_workers())
    with pytest.raises(UnavailableError, match="a worker was lost"):
        await lender.last_part()
    assert [len(rank.granted) for rank in lender.ranks] == [PAGES - 1] * 2
    assert len(lender.harness.core.exports.lent) == 0


async def test_the_time_in_which_a_prompt_was_computed_is_without_that_in_which_it_waited_or_was_lent() -> None:
    def lend(harness: Harness) -> None:
        harness.now += 50

    lender = Lender(lend)
    harness = lender.harness
    assert not (await anext(lender.calls)).is_last
    harness.now += 7
    harness.plan()
    harness.now += 3
    harness.run()
    assert (await lender.last_part()).computing_us == 3_000_000
