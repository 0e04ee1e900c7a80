"""The processor time of a Redis server for what scheduler groups and gateways keep there."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from common.fleet.state import NamedEvidence, open_fleet
from common.limits import SubjectLimits
from common.settings import CacheSettings, FleetSettings
from common.types import Subject
from gateway.answer_records.records import NewRecord
from gateway.answer_records.redis_records import RedisRecords
from gateway.answer_records.sealing import Sealing
from gateway.metrics import GatewayMetrics
from gateway.quotas.meters import MeteredAccount
from gateway.quotas.redis_meters import RedisMeters
from gateway.state.server import TIMEOUT_S, StateServer
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.fleet_desk import FleetDesk, rules_of
from tests.fakes.redis_process import temporary_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "a secret of the simulation, long enough"
GROUPS = 64
# Nested prefixes of a prompt of 512 tokens, with pages of 16.
PREFIXES = 32
REQUESTS = 1000
LOOK_UPS = 500
# Streams of one gateway that are recorded at once, and the tokens of each.
STREAMS = 256
TOKENS = 64
LIFETIME_S = 600.0
ROOM = 1 << 30


def measure_state_server(seconds: float) -> Iterator[tuple[str, float, str]]:
    """Yield (figure, value, unit); the idle groups are observed for `seconds`."""
    with temporary_redis() as server, server.client() as client:

        def used() -> float:
            info = client.info("cpu")
            return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

        yield "per group, without requests", 1e6 * asyncio.run(idle_groups(server.url, used, seconds)), "µs/s"
        evidence, name = asyncio.run(fleet(server.url, used))
        yield f"per request's evidence of {PREFIXES} prefixes", 1e6 * evidence, "µs"
        yield "per name looked up", 1e6 * name, "µs"
        limits, answer, token = asyncio.run(gateway(server.url, used))
        yield "per request with limits of tenant and subject", 1e6 * limits, "µs"
        yield "per answer recorded, without its tokens", 1e6 * answer, "µs"
        yield f"per token recorded, {STREAMS} streams", 1e6 * token, "µs"


async def idle_groups(url: str, used: Callable[[], float], seconds: float) -> float:
    """Return the server's processor seconds per second and group."""
    rules = CacheConfig(has_fleet=True)
    works = []
    for _ in range(GROUPS):
        opened = open_fleet(FleetSettings.model_validate({"state": url, "secret": SECRET}))
        assert opened is not None
        cache = RadixCache(PageAllocator(64), 16, rules)
        works.append(asyncio.create_task(FleetDesk(*opened, rules_of(CacheSettings()), partial(_same, cache)).run()))
    await asyncio.sleep(2)
    before = used()
    await asyncio.sleep(seconds)
    idle = (used() - before) / seconds / GROUPS
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)
    return idle


async def fleet(url: str, used: Callable[[], float]) -> tuple[float, float]:
    """Return the server's processor seconds per request's evidence, and per name that is looked up."""
    opened = open_fleet(FleetSettings.model_validate({"state": url, "secret": SECRET}))
    assert opened is not None
    state, keys = opened
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(state.close)
        before = used()
        for request in range(REQUESTS):
            # Half of each prompt is an application's, the rest is the user's.
            chains = [f"{0 if number < PREFIXES // 2 else request}-{number}".encode() for number in range(PREFIXES)]
            names = [keys.chain(("tenant",), chain) for chain in chains]
            prefixes = tuple((name, keys.tag(name, "tenant", f"user-{request}"), False) for name in names)
            await state.add_evidence([NamedEvidence(prefixes)], rules_of(CacheSettings()))
        evidence = (used() - before) / REQUESTS
        before = used()
        for call in range(LOOK_UPS):
            await state.look_up([f"{call}-{number}".encode().ljust(32) for number in range(64)])
        return evidence, (used() - before) / LOOK_UPS / 64


async def gateway(url: str, used: Callable[[], float]) -> tuple[float, float, float]:
    """Return the server's processor seconds per request with limits, per recorded answer, and per recorded token."""
    metrics = GatewayMetrics(CollectorRegistry())
    server = StateServer(url, metrics, prefix="pando", timeout_s=TIMEOUT_S)
    quota = SubjectLimits(requests_per_minute=10**9, tokens_per_minute=10**9, concurrent=10**6)
    meters = RedisMeters(server, None, metrics)
    records = RedisRecords(server, Sealing(SECRET), LIFETIME_S, ROOM)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        before = used()
        for number in range(REQUESTS):
            accounts = [MeteredAccount("tenant", None, quota), MeteredAccount("tenant", f"user-{number}", quota)]
            (await meters.take(accounts, 1, 100)).settle(50)
        await meters.flush()
        limits = (used() - before) / REQUESTS
        owner, names = f"{server.gateway_id}:1", [f"{number:040d}" for number in range(STREAMS)]
        before = used()
        for name in names:
            await records.open(NewRecord(name, None, Subject("tenant", name), b"x" * 2000, owner))
        for name in names:
            await records.finish(name, owner, b"the end")
            await records.drop(name)
        answer = (used() - before) / STREAMS
        for name in names:
            await records.open(NewRecord(name, None, Subject("tenant", name), b"x" * 2000, owner))
        before = used()
        for number in range(TOKENS):
            await asyncio.gather(*(records.append(name, owner, number, [b"one token's update"]) for name in names))
        return limits, answer, (used() - before) / STREAMS / TOKENS


def _same(cache: RadixCache) -> RadixCache:
    return cache
