"""Probes of shared prefixes that are spread over groups count as if made at one; without the state, per group."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from common.fleet.state import NamedWindow
from services.scheduler.cache.sharing.counters import WindowCounts
from services.scheduler.cache.sharing.fleet import FleetNews, ProbeCounts
from tests.fakes.redis_process import temporary_redis
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN
from tests.services.scheduler.fleet import Groups, groups_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.types import View
    from tests.fakes.redis_process import RedisProcess

SYSTEM = list(range(1, 81))
HIT_MIN = PLAIN.profile.hit_min


@pytest.fixture(name="server")
def running_server() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process


async def share(groups: Groups) -> None:
    """Let three users' prompts become shared in all groups."""
    for group in groups:
        for user in (ANN, BOB, CID):
            group.driver.serve(user, [*SYSTEM, 900])
    for _ in range(3):
        await groups.next_epoch()


async def probe(groups: Groups, *users: View, hits: int = HIT_MIN, epochs: int = 2, start: int = 100) -> None:
    """Let each user try `hits` continuations in each epoch, spread evenly over all groups."""
    for epoch in range(epochs):
        for user in users:
            for number in range(hits):
                driver = groups[number % len(groups)].driver
                driver.end(driver.admit(user, [*SYSTEM, start + epoch * hits + number, 0]))
        await groups.next_epoch()
    # The counts have an effect at a boundary, and the quarantine at the other groups' next one.
    for _ in range(3):
        await groups.next_epoch()


def found(groups: Groups, user: View) -> list[int]:
    return [group.driver.peek(user, [*SYSTEM, 7]) for group in groups]


async def test_a_prober_that_spreads_over_groups_is_quarantined_in_all_of_them(server: RedisProcess) -> None:
    async with groups_at(server.url, 4) as groups:
        await share(groups)
        assert found(groups, DAN) == [80] * 4
        await probe(groups, DAN)
        assert found(groups, DAN) == [0] * 4
        assert found(groups, EVE) == [80] * 4
        for group in groups:
            group.driver.check()


async def test_fewer_hits_than_a_person_may_make_are_not_judged(server: RedisProcess) -> None:
    async with groups_at(server.url, 4) as groups:
        await share(groups)
        await probe(groups, DAN, hits=HIT_MIN - 1)
        assert found(groups, DAN) == [80] * 4


async def test_as_many_subjects_as_a_promotion_requires_are_healthy_wherever_they_ask(server: RedisProcess) -> None:
    async with groups_at(server.url, 4) as groups:
        await share(groups)
        await probe(groups, *(user_named(f"guest-{number}") for number in range(3)), hits=12)
        assert [found(groups, user_named(f"guest-{number}")) for number in range(3)] == [[80] * 4] * 3


def user_named(name: str) -> View:
    return type(ANN)(type(ANN.subject)("tenant", name))


async def test_continuations_of_one_subject_are_counted_over_all_groups(server: RedisProcess) -> None:
    limit = PLAIN.profile.continuation_limit
    async with groups_at(server.url, 4) as groups:
        await share(groups)
        # Enough users for a healthy window, one of whom tries too much.
        guests = [user_named(f"guest-{number}") for number in range(3)]
        for guest in guests:
            for group in groups:
                group.driver.end(group.driver.admit(guest, [*SYSTEM, 99, 0]))
        await probe(groups, DAN, hits=limit, epochs=1)
        assert found(groups, DAN) == [0] * 4
        assert found(groups, guests[0]) == [80] * 4


async def test_the_same_continuations_at_every_group_count_once(server: RedisProcess) -> None:
    limit = PLAIN.profile.continuation_limit
    async with groups_at(server.url, 4) as groups:
        await share(groups)
        guests = [user_named(f"guest-{number}") for number in range(3)]
        for user in (DAN, *guests):
            for group in groups:
                for number in range(limit // 8):
                    group.driver.end(group.driver.admit(user, [*SYSTEM, 100 + number, 0]))
        for _ in range(4):
            await groups.next_epoch()
        assert found(groups, DAN) == [80] * 4


async def test_without_the_state_each_group_counts_for_itself(server: RedisProcess) -> None:
    async with groups_at(server.url, 2) as groups:
        await share(groups)
        server.kill()
        for _ in range(2):
            for number in range(HIT_MIN):
                groups[0].driver.end(groups[0].driver.admit(DAN, [*SYSTEM, 100 + number, 0]))
                if number % 2:
                    groups[1].driver.end(groups[1].driver.admit(EVE, [*SYSTEM, 100 + number, 0]))
            await groups.next_epoch()
        await groups.next_epoch()
        assert found(groups, DAN) == [0, 80]
        assert found(groups, EVE) == [80, 80]


async def test_windows_of_an_outage_are_not_counted_afterwards(server: RedisProcess) -> None:
    async with groups_at(server.url, 2) as groups:
        await share(groups)
        server.kill()
        for number in range(HIT_MIN):
            driver = groups[number % 2].driver
            driver.end(driver.admit(DAN, [*SYSTEM, 100 + number, 0]))
        await groups.next_epoch()
        for group in groups:
            group.driver.next_epoch()
        server.start()
        await groups.poll()
        with server.client() as client:
            assert not list(client.scan_iter("*:w:*"))


async def test_a_repeated_report_replaces_the_first_and_marks_are_counted_once(server: RedisProcess) -> None:
    async with groups_at(server.url, 1) as groups:
        state, name = groups[0].state, secrets.token_bytes(16)
        window = NamedWindow(name, 5, (b"ann", b"bob"))
        assert await state.count_windows(b"one", [window], 60.0) == [(5, 2, 0, 0)]
        assert await state.count_windows(b"one", [window], 60.0) == [(5, 2, 0, 0)]
        other = NamedWindow(name, 4, (b"bob", b"cid"))
        assert await state.count_windows(b"two", [other], 60.0) == [(9, 3, 0, 0)]
        many = [NamedWindow(secrets.token_bytes(16), number, (b"x",)) for number in range(150)]
        sums = await state.count_windows(b"one", many, 60.0)
        assert sums == [(number, 1, 0, 0) for number in range(150)]


async def test_a_window_becomes_the_one_before_and_then_expires(server: RedisProcess) -> None:
    async with groups_at(server.url, 1) as groups:
        state, name = groups[0].state, secrets.token_bytes(16)
        with server.client() as client:
            await state.count_windows(b"one", [NamedWindow(name, 5, (b"ann",))], 0.2)
            (key,) = client.scan_iter("*:w:*")
            wait_for_server_time(client, 0.2)
            hits, users, before, users_before = (await state.count_windows(b"one", [NamedWindow(name, 7, ())], 0.2))[0]
            assert (hits, users) == (7, 0)
            # A busy machine may have taken longer than the window before lasts.
            assert (before, users_before) in ((5, 1), (0, 0))
            assert 0 < client.pttl(key) <= 600


def wait_for_server_time(client: object, seconds: float) -> None:
    time = client.time  # type: ignore[attr-defined]  # redis-py's client
    begin = time()
    while (now := time())[0] + now[1] / 1e6 - begin[0] - begin[1] / 1e6 < seconds:
        pass


def test_counts_survive_the_decision_log() -> None:
    counts = ProbeCounts(("tenant",), b"\x01" * 16, ("tenant",), (1, 2**63), WindowCounts(20, 2, 16, 1), tries=3)
    news = FleetNews(probes=(counts,))
    assert FleetNews.from_description(news.described()) == news
