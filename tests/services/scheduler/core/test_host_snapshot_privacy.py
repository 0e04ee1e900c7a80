"""Paired runs: users of snapshots over two tiers observe nothing of what others hold privately (B1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.transfers import TransferDirection
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from tests.examples import examples
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

if TYPE_CHECKING:
    from services.scheduler.cache.factory import CacheName
    from services.scheduler.cache.state_snapshots import StateSnapshots

PAGE_SIZE = 4
VICTIM, WATCHERS = "victim", ("ann", "bob")
# Fewer than the threshold of four, with the victim.
FIRST = tuple(f"early {number}" for number in range(4))
APP = tuple(range(20, 20 + 6 * PAGE_SIZE))
SECRET = tuple(range(100, 100 + 9 * PAGE_SIZE))
DECOY = tuple(range(200, 200 + 9 * PAGE_SIZE))
TAIL = tuple(range(300, 311))


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that is served to its end."""

    user: str
    ids: tuple[int, ...]
    max_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to everybody: all pages leave the device, all snapshots a tier, or an epoch begins."""

    kind: str


Deed = Ask | Event
Seen = tuple[str, int, list[tuple[int, int]], list[int]]


class World:
    """Does deeds without lack of memory, and keeps what each user could observe."""

    def __init__(self, cache: CacheName, policy: WritePolicy) -> None:
        self.harness = Harness(
            pages=600,
            snapshots=400,
            interval=2,
            host=HostConfig(pages=800, snapshots=600, policy=policy),
            cache=cache,
            rules=CacheConfig(promotion_subjects=4, headroom_share=0.0, quota_share=1.0),
            max_context=120,
        )
        self.seen: list[Seen] = []
        self.loads = 0
        self.begin()
        self.do([*(Ask(user, (*APP, 1)) for user in FIRST), Event("epoch")])

    def begin(self) -> None:
        """Add what else there is before the first request."""

    @property
    def pools(self) -> tuple[StateSnapshots, StateSnapshots]:
        """The snapshots of the device and of the host."""
        host, device = self.harness.cache.host, self.harness.cache.snapshots
        assert device is not None
        assert host is not None
        assert host.states is not None
        return device, host.states.host

    def do(self, deeds: list[Deed]) -> World:
        for number, deed in enumerate(deeds):
            if isinstance(deed, Ask):
                self._ask(f"{len(self.harness.finishes)}-{number}", deed)
            else:
                self._happen(deed.kind)
            self.harness.audit()
        return self

    def _ask(self, name: str, ask: Ask) -> None:
        harness, ids = self.harness, list(ask.ids)
        before = len(harness.plans)
        harness.core.submit(make_request(name, ids, user=ask.user, max_tokens=ask.max_tokens), 0.0)
        harness.run()
        assert harness.outputs[name, 0] == expected_output(ids, len(ids) + ask.max_tokens, (STOP_ID,))
        plans = harness.plans[before:]
        loads = [
            (transfer.pages, len(transfer.host_snapshots))
            for plan in plans
            for transfer in plan.transfers
            if transfer.direction is TransferDirection.HOST_TO_DEVICE
        ]
        self.loads += len(loads)
        chunks = [chunk.length for plan in plans for chunk in plan.prefills]
        self.seen.append((ask.user, harness.cached[name, 0], loads, chunks))

    def _happen(self, kind: str) -> None:
        cache = self.harness.cache
        assert cache.host is not None
        if kind == "epoch":
            cache.advance(cache.epoch + 1)
        elif kind == "pages leave":
            cache.host.back_up_all()
            self.harness.run()
            cache.evict(self.harness.config.device_pages)
        else:
            pool = self.pools[kind == "host snapshots go"]
            pool.forget(np.array(sorted({entry.page for entry in pool.all()}), np.int32))

    def seen_by_others(self) -> list[Seen]:
        return [each for each in self.seen if each[0] != VICTIM]


parts = st.integers(1, len(SECRET)).map(lambda length: SECRET[:length])
texts = st.builds(
    lambda stem, part, tail: (*stem, *part, *TAIL[:tail]),
    st.sampled_from([(), APP]),
    st.one_of(parts, st.just(())),
    st.integers(1, len(TAIL)),
)
events = st.sampled_from(["pages leave", "pages leave", "device snapshots go", "host snapshots go", "epoch"]).map(Event)
ours = st.lists(
    st.one_of(st.builds(Ask, st.sampled_from(WATCHERS), texts, st.integers(1, 9)), events), min_size=3, max_size=12
)
# Where the victim asks. That a public prompt was used lately, so that it has snapshots, is not secret.
places = st.lists(st.integers(0, 20), min_size=1, max_size=3)
policies = st.sampled_from([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])


def with_victim(deeds: list[Deed], text: tuple[int, ...], at: list[int]) -> list[Deed]:
    mixed = list(deeds)
    for place in at:
        mixed.insert(place % (len(mixed) + 1), Ask(VICTIM, (*text, 1), 6))
    return mixed


def assert_nobody_notices(one: list[Deed], other: list[Deed], cache: CacheName, policy: WritePolicy) -> World:
    left, right = World(cache, policy).do(one), World(cache, policy).do(other)
    assert left.seen_by_others() == right.seen_by_others()
    return left


@examples(12)
@given(ours, places, policies, st.sampled_from(["user_aware", "isolated"]))
def test_others_do_not_notice_whether_a_victim_has_snapshots_on_either_tier(
    deeds: list[Deed], at: list[int], policy: WritePolicy, cache: CacheName
) -> None:
    assert_nobody_notices(with_victim(deeds, SECRET, at), deeds, cache, policy)


@examples(12)
@given(ours, places, st.sampled_from([(), APP]), policies)
def test_guesses_do_not_reveal_of_which_text_a_victim_has_snapshots(
    deeds: list[Deed], at: list[int], stem: tuple[int, ...], policy: WritePolicy
) -> None:
    one, other = (with_victim(deeds, stem + text, at) for text in (SECRET, DECOY))
    assert_nobody_notices(one, other, "user_aware", policy)


PROBE: list[Deed] = [Ask(VICTIM, (*SECRET, 1)), Event("pages leave"), Ask("ann", (*SECRET, 1))]


def test_the_shared_cache_shows_a_snapshot_that_is_loaded_for_another_user() -> None:
    """Otherwise equal worlds would prove nothing."""
    left = World("shared", WritePolicy.WRITE_THROUGH).do(PROBE)
    assert left.seen_by_others()[-1][1:3] == (len(SECRET), [(9, 1)])
    with pytest.raises(AssertionError):
        assert_nobody_notices(PROBE, PROBE[1:], "shared", WritePolicy.WRITE_THROUGH)


def test_a_user_s_own_snapshots_are_loaded_beside_a_victim_s_equal_text() -> None:
    own = Ask("ann", (*SECRET, 1))
    world = assert_nobody_notices([own, *PROBE], [own, *PROBE[1:]], "user_aware", WritePolicy.WRITE_THROUGH)
    assert world.seen_by_others()[-1][1:3] == (len(SECRET), [(9, 1)])


@pytest.mark.parametrize("leaves", [False, True])
def test_private_snapshots_of_a_text_that_became_shared_are_of_use_to_their_owner_alone(leaves: bool) -> None:
    """They stay on pages that everybody finds, on both tiers."""
    odd = SECRET[: 5 * PAGE_SIZE]
    shared: list[Deed] = [*(Ask(user, (*SECRET, 1)) for user in FIRST), Event("epoch")]
    shared += [Event("pages leave")] * leaves
    probe = Ask("ann", (*odd, 1))
    victim = Ask(VICTIM, (*odd, 1))
    assert_nobody_notices([victim, *shared, probe], [*shared, probe], "user_aware", WritePolicy.WRITE_THROUGH)
    world = World("user_aware", WritePolicy.WRITE_THROUGH).do([victim, *shared, probe, victim])
    assert [cached for user, cached, _, _ in world.seen[-2:]] == [0, len(odd)]
    # The pages are there again, as ann has computed them.
    assert world.seen[-1][2] == [(0, 1)] * leaves


@pytest.mark.parametrize("leaves", [False, True])
def test_a_user_keeps_snapshots_of_a_text_that_becomes_shared_whether_a_victim_had_it_first_or_not(
    leaves: bool,
) -> None:
    ask = Ask("ann", (*SECRET, 1))
    shared: list[Deed] = [ask, *[Event("pages leave")] * leaves]
    shared += [*(Ask(user, (*SECRET, 1)) for user in FIRST), Event("epoch"), ask]
    victim = Ask(VICTIM, (*SECRET, 1))
    world = assert_nobody_notices([victim, *shared], shared, "user_aware", WritePolicy.WRITE_THROUGH)
    assert world.seen_by_others()[-1][1] == len(SECRET)
