"""Paired runs: users of stored snapshots observe nothing of what others have stored privately (B1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.transfers import TransferDirection
from services.scheduler.cache.tiers.config import PrefetchPolicy, StorageConfig, WritePolicy
from tests.examples import examples
from tests.fakes.storing_worker import Objects, storing
from tests.services.scheduler.core.test_host_snapshot_privacy import (
    APP,
    DECOY,
    FIRST,
    PAGE_SIZE,
    SECRET,
    VICTIM,
    Ask,
    Deed,
    Event,
    World,
    events,
    ours,
    places,
    with_victim,
)
from tests.services.scheduler.core.test_storage_properties import Names

if TYPE_CHECKING:
    from services.scheduler.cache.factory import CacheName

READS = (TransferDirection.STORAGE_TO_HOST, TransferDirection.FIND_IN_STORAGE)
# What each read of a request has brought: direction, pages, snapshots, and names or pages that were found.
Reads = list[tuple[str, int, int, int]]


class StoredWorld(World):
    """A world with a storage, whose workers may be lost with both tiers above it."""

    def begin(self) -> None:
        self.objects: Objects = {}
        self.names = Names()
        self.reads: list[tuple[str, Reads]] = []
        self._outcomes: dict[int, int] = {}
        host = self.harness.cache.host
        assert host is not None
        host.add_storage(StorageConfig(PrefetchPolicy.WAIT_COMPLETE, min_pages=2), self.names)
        self._store()

    def _store(self) -> None:
        self.harness.worker = storing(self.harness.worker, self.objects)
        core, inner = self.harness.core, self.harness.core.finish_transfer

        def finish(ack: object, now: float) -> None:
            self._outcomes[ack.transfer_id] = ack.done_pages  # type: ignore[attr-defined]  # an acknowledgement
            inner(ack, now)  # type: ignore[arg-type]

        if "finish_transfer" not in vars(core):
            core.finish_transfer = finish  # type: ignore[method-assign]  # to see what was found

    def _ask(self, name: str, ask: Ask) -> None:
        before = len(self.harness.plans)
        super()._ask(name, ask)
        reads = [
            (one.direction.value, len(one.host_pages), len(one.host_snapshots), self._outcomes[one.transfer_id])
            for plan in self.harness.plans[before:]
            for one in plan.transfers
            if one.direction in READS
        ]
        self.reads.append((ask.user, reads))

    def _happen(self, kind: str) -> None:
        if kind != "workers go":
            super()._happen(kind)
            return
        self.harness.run()
        self.harness.lose_workers()
        self._store()

    def reads_of_others(self) -> list[tuple[str, Reads]]:
        return [each for each in self.reads if each[0] != VICTIM]


losses = st.one_of(events, st.just(Event("workers go")), st.just(Event("workers go")))
deeds = st.tuples(ours, st.lists(st.tuples(st.integers(0, 12), losses), min_size=1, max_size=4)).map(
    lambda drawn: mixed(*drawn)
)


def mixed(asked: list[Deed], more: list[tuple[int, Event]]) -> list[Deed]:
    together = list(asked)
    for place, event in more:
        together.insert(place % (len(together) + 1), event)
    return together


def assert_nobody_notices(one: list[Deed], other: list[Deed], cache: CacheName) -> StoredWorld:
    left, right = (StoredWorld(cache, WritePolicy.WRITE_THROUGH) for _ in range(2))
    left.do(one)
    right.do(other)
    assert left.seen_by_others() == right.seen_by_others()
    assert left.reads_of_others() == right.reads_of_others()
    return left


@examples(12)
@given(deeds, places, st.sampled_from(["user_aware", "isolated"]))
def test_others_do_not_notice_whether_a_victim_has_stored_snapshots(
    drawn: list[Deed], at: list[int], cache: CacheName
) -> None:
    assert_nobody_notices(with_victim(drawn, SECRET, at), drawn, cache)


@examples(12)
@given(deeds, places, st.sampled_from([(), APP]))
def test_guesses_do_not_reveal_of_which_text_a_victim_has_stored_snapshots(
    drawn: list[Deed], at: list[int], stem: tuple[int, ...]
) -> None:
    one, other = (with_victim(drawn, stem + text, at) for text in (SECRET, DECOY))
    assert_nobody_notices(one, other, "user_aware")


PROBE: list[Deed] = [Ask(VICTIM, (*SECRET, 1)), Event("workers go"), Ask("ann", (*SECRET, 1))]


def test_the_shared_cache_shows_a_snapshot_that_another_user_has_stored() -> None:
    """Otherwise equal worlds would prove nothing."""
    left = StoredWorld("shared", WritePolicy.WRITE_THROUGH)
    left.do(PROBE)
    assert left.seen_by_others()[-1][1] == len(SECRET)
    assert left.reads_of_others()[-1][1][-1][1:] == (0, 1, 1)
    with pytest.raises(AssertionError):
        assert_nobody_notices(PROBE, PROBE[1:], "shared")


def test_a_user_s_own_snapshots_are_read_beside_a_victim_s_equal_ones() -> None:
    own = Ask("ann", (*SECRET, 1))
    world = assert_nobody_notices([own, *PROBE], [own, *PROBE[1:]], "user_aware")
    assert world.seen_by_others()[-1][1] == len(SECRET)


def test_a_victim_s_snapshots_of_a_text_that_became_shared_are_found_by_the_victim_alone() -> None:
    """They are on pages that all find in storage, too."""
    odd = SECRET[: 5 * PAGE_SIZE]
    shared: list[Deed] = [*(Ask(user, (*SECRET, 1)) for user in FIRST), Event("epoch"), Event("workers go")]
    victim, probe = Ask(VICTIM, (*odd, 1)), Ask("ann", (*odd, 1))
    assert_nobody_notices([victim, *shared, probe], [*shared, probe], "user_aware")
    world = StoredWorld("user_aware", WritePolicy.WRITE_THROUGH)
    world.do([victim, *shared, victim])
    assert world.seen[-1][1] == len(odd)
