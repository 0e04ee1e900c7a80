"""Limits that several gateways share: the same decisions as in memory, dead gateways, a server that goes away."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from common.limits import SubjectLimits
from gateway.quotas.memory_meters import MemoryMeters
from gateway.quotas.meters import ChargeKind, Limit, MeteredAccount
from gateway.quotas.redis_meters import RedisMeters
from gateway.state.server import StateAwayError
from tests.fakes.redis_process import temporary_redis
from tests.gateway.state.servers import new_metrics, new_prefix, state_server, working
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.quotas.meters import Taking
    from tests.fakes.redis_process import RedisProcess


@asynccontextmanager
async def gateways(
    redis_process: RedisProcess, count: int, clock: Callable[[], float] | None = None, lease_s: float = 30.0
) -> AsyncIterator[list[RedisMeters]]:
    prefix = new_prefix()
    async with AsyncExitStack() as stack:
        meters = []
        for _ in range(count):
            server = await stack.enter_async_context(state_server(redis_process.url, prefix))
            meters.append(RedisMeters(server, None, new_metrics(), clock=clock, lease_s=lease_s))
        yield meters


def account(name: str | None = None, **limits: int) -> MeteredAccount:
    return MeteredAccount("acme", name, SubjectLimits(**limits))


async def open_now(meters: RedisMeters, of: MeteredAccount) -> int:
    """Try how many requests can still be opened; leave none of them open."""
    taken: list[Taking] = []
    while (taking := await meters.take([of], 1, 0)).obstacle is None:
        taken.append(taking)
    for taking in taken:
        taking.settle(0)
    await meters.flush()
    return len(taken)


async def test_a_continued_answer_takes_a_place_and_its_difference_in_tokens_only(redis_process: RedisProcess) -> None:
    limited = account(requests_per_minute=1, tokens_per_minute=100, concurrent=1)
    async with gateways(redis_process, 1, lambda: 1.0) as [shared]:
        for meters in (shared, MemoryMeters(lambda: 1.0)):
            first = await meters.take([limited], 1, 100)
            refused = await meters.take([limited], 1, 0, ChargeKind.CONTINUED)
            assert refused.obstacle is not None
            assert refused.obstacle.limit is Limit.CONCURRENT
            first.settle(30)
            await shared.flush()
            # No request is left in this minute, and the answer was charged with 30 tokens before.
            continued = await meters.take([limited], 1, 0, ChargeKind.CONTINUED)
            assert continued.obstacle is None
            assert (await meters.take([limited], 1, 0, ChargeKind.CONTINUED)).obstacle is not None
            continued.settle(12)
            await shared.flush()
            other = await meters.take([limited], 1, 50)
            assert other.obstacle is not None
            assert other.obstacle.limit is Limit.REQUESTS
            level = other.readings[0].tokens
            assert level is not None
            assert level.left == 100 - 30 - 12


async def test_an_inherited_answer_takes_a_place_beyond_the_limit(redis_process: RedisProcess) -> None:
    limited = account(requests_per_minute=1, tokens_per_minute=100, concurrent=1)
    async with gateways(redis_process, 1, lambda: 1.0) as [shared]:
        for meters in (shared, MemoryMeters(lambda: 1.0)):
            dead = await meters.take([limited], 1, 100)
            inherited = await meters.take([limited], 1, 0, ChargeKind.INHERITED)
            assert (dead.obstacle, inherited.obstacle) == (None, None)
            dead.settle(100)
            await shared.flush()
            assert (await meters.take([limited], 1, 0, ChargeKind.CONTINUED)).obstacle is not None
            inherited.settle(0)
            await shared.flush()
            assert (await meters.take([limited], 1, 0, ChargeKind.CONTINUED)).obstacle is None


async def test_two_gateways_decide_as_one_in_memory_does(redis_process: RedisProcess) -> None:
    now = 0.0
    draw = random.Random(5)
    tenant = account(requests_per_minute=300, tokens_per_minute=20_000, concurrent=9)
    users = [account(f"user/{number}", requests_per_minute=120, concurrent=5) for number in range(3)]
    memory = MemoryMeters(lambda: now)
    refused = 0
    async with gateways(redis_process, 2, lambda: now, lease_s=1e6) as shared:
        open_requests: list[tuple[int, Taking, Taking, RedisMeters]] = []
        for _ in range(1500):
            now = round(now + draw.expovariate(8), 6)  # the scripts count microseconds
            if open_requests and draw.random() < 0.45:
                announced, alone, together, gateway = open_requests.pop(draw.randrange(len(open_requests)))
                used = draw.randrange(2 * announced)
                alone.settle(used)
                together.settle(used)
                await gateway.flush()
                continue
            accounts = [tenant, draw.choice(users)]
            requests, tokens, gateway = draw.choice((1, 1, 1, 2)), draw.randrange(1, 900), draw.choice(shared)
            alone = await memory.take(accounts, requests, tokens)
            together = await gateway.take(accounts, requests, tokens)
            assert why(together) == why(alone)
            assert levels(together) == pytest.approx(levels(alone), abs=1e-3)
            if alone.obstacle is None:
                open_requests.append((tokens, alone, together, gateway))
            refused += alone.obstacle is not None
    assert 200 < refused < 1200


async def test_exactly_the_limit_passes_when_all_gateways_ask_at_once(redis_process: RedisProcess) -> None:
    limited = account(requests_per_minute=100)
    async with gateways(redis_process, 3, lambda: 0.0) as meters:
        takings = await asyncio.gather(*(meters[number % 3].take([limited], 1, 0) for number in range(600)))
    assert sum(taking.obstacle is None for taking in takings) == 100


async def test_places_of_a_dead_gateway_are_free_after_its_lease_and_those_of_the_living_are_not(
    redis_process: RedisProcess,
) -> None:
    now = 1000.0
    limited = account(concurrent=4)
    async with gateways(redis_process, 2, lambda: now, lease_s=30.0) as (living, dying):
        await living.take([limited], 1, 0)
        for _ in range(3):
            await dying.take([limited], 1, 0)
        # Both renew for longer than a lease.
        for _ in range(3):
            now += 20.0
            await living._renew()
            await dying._renew()
            assert await open_now(living, limited) == 0
        # One renews no longer, and never said that its requests ended.
        for free in (0, 3):
            now += 20.0
            await living._renew()
            assert await open_now(living, limited) == free


async def test_open_requests_are_renewed_within_their_lease(redis_process: RedisProcess) -> None:
    limited = account(concurrent=1)
    async with gateways(redis_process, 1, lease_s=1.5) as [meters], working(meters.run):
        await meters.take([limited], 1, 0)
        leases = meters._keys(limited)[1]
        with redis_process.client() as client:
            [(_, expiry)] = client.zrange(leases, 0, -1, withscores=True)
            await until(lambda: client.zrange(leases, 0, -1, withscores=True)[0][1] > expiry)


async def test_tokens_of_a_request_whose_end_is_reported_twice_count_once(redis_process: RedisProcess) -> None:
    limited = account(tokens_per_minute=1000)
    async with gateways(redis_process, 1, lambda: 0.0) as [meters]:
        taking = await meters.take([limited], 1, 100)
        taking.settle(300)
        taking.settle(300)
        await meters.flush()
        level = (await meters.take([limited], 1, 0)).readings[0].tokens
    assert level is not None
    assert level.left == 700


async def test_a_clock_that_is_set_back_gives_nothing_away(redis_process: RedisProcess) -> None:
    now = 1000.0
    limited = account(requests_per_minute=60)
    async with gateways(redis_process, 1, lambda: now) as [meters]:
        for _ in range(60):
            assert (await meters.take([limited], 1, 0)).obstacle is None
        now = 10.0
        assert (await meters.take([limited], 1, 0)).obstacle is not None


async def test_redis_keys_of_meters_expire(redis_process: RedisProcess) -> None:
    async with gateways(redis_process, 1) as [meters]:
        taking = await meters.take([account(requests_per_minute=60, tokens_per_minute=60, concurrent=2)], 1, 30)
        taking.settle(600)
        await meters.flush()
        with redis_process.client() as client:
            keys = list(client.scan_iter(f"{meters._state.prefix}:limits:*"))
            # An ended request leaves no lease; ten minutes' tokens need ten minutes to refill.
            assert len(keys) == 1
            assert 600_000 < int(client.pttl(keys[0])) <= 660_000


async def test_open_requests_still_count_after_the_server_has_lost_everything() -> None:
    limited = account(concurrent=2)
    with temporary_redis() as redis_process:
        async with gateways(redis_process, 2, lease_s=1.0) as (first, second), working(first.run, second.run):
            await first.take([limited], 1, 0)
            redis_process.kill()
            with pytest.raises(StateAwayError):
                await second.take([limited], 1, 0)
            redis_process.start()
            await until(lambda: first._state.is_up and second._state.is_up)
            # Renewed within a third of the lease.
            async with asyncio.timeout(60):
                while await open_now(second, limited) != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def test_while_the_server_is_down_limits_fail_closed_or_hold_per_gateway() -> None:
    limited = account(requests_per_minute=10)
    metrics = new_metrics()
    with temporary_redis() as redis_process:
        async with state_server(redis_process.url, new_prefix(), metrics=metrics) as server:
            closed = RedisMeters(server, None, metrics)
            opened = RedisMeters(server, MemoryMeters(lambda: 0.0), metrics)
            redis_process.kill()
            with pytest.raises(StateAwayError) as refused:
                await closed.take([limited], 1, 0)
            assert refused.value.retry_after_ms
            assert (await closed.take([], 1, 0)).obstacle is None, "nothing to count, nothing to ask"
            takings = [await opened.take([limited], 1, 0) for _ in range(15)]
            assert sum(taking.obstacle is None for taking in takings) == 10
            text = metrics.exposition()[0].decode()
            assert "pando_gateway_unshared_limits_total 15.0" in text
            assert 'pando_gateway_link_connected{link="state",model=""} 0.0' in text


def why(taking: Taking) -> object:
    """Return what forbids it, if anything does."""
    obstacle = taking.obstacle
    return None if obstacle is None else (obstacle.account, obstacle.limit, round(obstacle.wait_s, 3))


def levels(taking: Taking) -> list[float]:
    """Return what is left of each limit."""
    found = [level for reading in taking.readings for level in (reading.requests, reading.tokens)]
    return [level.left for level in found if level is not None]


@pytest.mark.parametrize("damaged", [[], [b"x", b"", b""], [b"1", b"NOTHING", b""], [b"0", b"", b"", b"\xff", b""]])
async def test_a_damaged_reply_counts_as_a_server_that_is_away(
    redis_process: RedisProcess, damaged: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = account(requests_per_minute=2, tokens_per_minute=100, concurrent=1)
    async with gateways(redis_process, 1) as [meters]:

        async def reply(*_arguments: object) -> list[bytes]:
            return damaged

        with monkeypatch.context() as patch:
            patch.setattr(meters, "_call", reply)
            with pytest.raises(StateAwayError):
                await meters.take([limited], 1, 10)
        running = asyncio.create_task(meters._state.run())
        await meters._state.wait_up()
        running.cancel()
        await meters.flush()
        assert (await meters.take([limited], 1, 10)).obstacle is None, "what it may have taken was given back"
