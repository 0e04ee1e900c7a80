"""Limits of tenants and users, on a clock that the tests turn; counted in memory, and by two gateways in Redis."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import Limits, SubjectLimits, TenantLimits
from common.types import RequestId, Subject
from gateway.ledger.entries import Tokens, Work
from gateway.quotas.memory_meters import MAX_METERS, Bucket, MemoryMeters, Meter
from gateway.quotas.meters import ChargeKind
from gateway.quotas.quotas import BudgetError, Charge, Lease, LimitedError, Quotas
from gateway.quotas.redis_meters import RedisMeters
from tests.gateway.state.servers import new_metrics, new_prefix, state_server
from tests.gateway.support import memory_ledger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.quotas.meters import Meters
    from tests.fakes.redis_process import RedisProcess

ANN, BOB = Subject("acme", "user/ann"), Subject("acme", "user/bob")


class Bench:
    """Quotas with rules and a clock to change. With several meters, each request goes to the next gateway."""

    def __init__(self) -> None:
        self.value = Limits()
        self.now = 0.0
        self.gateways: list[tuple[Quotas, Meters]] = []
        self._asked = 0

    def limit(self, quota: TenantLimits) -> None:
        self.value = Limits(default=quota)

    def add(self, meters: Meters) -> None:
        self.gateways.append((Quotas(self, meters, memory_ledger()), meters))

    async def take(self, subject: Subject = ANN, requests: int = 1, tokens: int = 0) -> Lease:
        self._asked += 1
        quotas, _ = self.gateways[self._asked % len(self.gateways)]
        return await quotas.take(Charge(subject, requests, tokens))

    async def use(self, subject: Subject = ANN, tokens: int = 0, used: int = 0) -> None:
        await self.settle(await self.take(subject, tokens=tokens), used)

    async def settle(self, lease: Lease, used: int = 0) -> None:
        """End a request, and wait until all gateways know."""
        lease.settle(used)
        for _, meters in self.gateways:
            if isinstance(meters, RedisMeters):
                await meters.flush()

    async def is_refused(self, subject: Subject = ANN, tokens: int = 0) -> bool:
        try:
            await self.use(subject, tokens)
        except LimitedError:
            return True
        return False


@pytest.fixture(params=["memory", "redis"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench()
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            bench.add(MemoryMeters(lambda: bench.now))
        else:
            redis_process: RedisProcess = request.getfixturevalue("redis_process")
            prefix = new_prefix()
            for _ in range(2):
                server = await stack.enter_async_context(state_server(redis_process.url, prefix, probes=False))
                bench.add(RedisMeters(server, None, new_metrics(), clock=lambda: bench.now))
        yield bench


async def test_requests_per_minute_refill_steadily(bench: Bench) -> None:
    bench.limit(TenantLimits(requests_per_minute=60))
    for _ in range(60):
        await bench.use()
    with pytest.raises(LimitedError, match="60 requests per minute") as refused:
        await bench.take()
    assert refused.value.retry_after_ms == 1000
    bench.now = 1.0
    assert not await bench.is_refused()
    assert await bench.is_refused()


async def test_tokens_are_charged_as_announced_and_corrected_at_the_end(bench: Bench) -> None:
    bench.limit(TenantLimits(tokens_per_minute=600))
    lease = await bench.take(tokens=500)
    assert await bench.is_refused(tokens=200)
    await bench.settle(lease, 100)
    assert not await bench.is_refused(tokens=500)
    await bench.use(tokens=10, used=5000)
    assert await bench.is_refused(tokens=1)


async def test_more_than_a_minutes_budget_passes_when_the_bucket_is_full(bench: Bench) -> None:
    bench.limit(TenantLimits(tokens_per_minute=100))
    await bench.use(tokens=100_000, used=100_000)
    assert await bench.is_refused(tokens=1)


async def test_concurrent_requests_count_until_they_end(bench: Bench) -> None:
    bench.limit(TenantLimits(concurrent=2))
    first, _ = await bench.take(), await bench.take()
    assert await bench.is_refused()
    await bench.settle(first)
    assert not await bench.is_refused()


async def test_a_batch_beyond_the_limit_passes_when_nothing_else_is_open(bench: Bench) -> None:
    bench.limit(TenantLimits(concurrent=2))
    batch = await bench.take(requests=5)
    assert await bench.is_refused()
    await bench.settle(batch)
    single = await bench.take()
    with pytest.raises(LimitedError):
        await bench.take(requests=5)
    await bench.settle(single)
    await bench.take(requests=5)


async def test_a_user_at_the_limit_does_not_hinder_the_others_but_the_tenant_is_bounded(bench: Bench) -> None:
    bench.limit(TenantLimits(requests_per_minute=3, each_subject=SubjectLimits(requests_per_minute=2)))
    assert [await bench.is_refused(ANN) for _ in range(3)] == [False, False, True]
    assert [await bench.is_refused(BOB) for _ in range(2)] == [False, True]
    assert not await bench.is_refused(Subject("other", "user/ann"))


async def test_subjects_with_similar_names_have_separate_meters(bench: Bench) -> None:
    bench.limit(TenantLimits(each_subject=SubjectLimits(requests_per_minute=1)))
    subjects = [
        Subject(tenant, name)
        for tenant in ("a", "a:b", "a}", "{a}", "*")
        for name in ("b", "key/b", "user/b", "b:leases", "tenant", "subject:b", "\x00", "b " * 100)
    ]
    assert [await bench.is_refused(subject) for subject in subjects] == [False] * 40
    assert [await bench.is_refused(subject) for subject in subjects] == [True] * 40


async def test_a_refused_request_consumes_no_quota(bench: Bench) -> None:
    bench.limit(TenantLimits(requests_per_minute=100, concurrent=1, each_subject=SubjectLimits(requests_per_minute=1)))
    await bench.use(ANN)
    for _ in range(200):
        assert await bench.is_refused(ANN)
    assert not await bench.is_refused(BOB)


async def test_changed_limits_apply_at_once_and_to_earlier_usage(bench: Bench) -> None:
    bench.limit(TenantLimits(concurrent=5, requests_per_minute=100))
    lease = await bench.take()
    bench.limit(TenantLimits(concurrent=1, requests_per_minute=100))
    assert await bench.is_refused()
    await bench.settle(lease)
    assert not await bench.is_refused()
    bench.limit(TenantLimits(requests_per_minute=3))
    assert [await bench.is_refused() for _ in range(2)] == [False, True]
    bench.limit(TenantLimits(requests_per_minute=4))
    assert [await bench.is_refused() for _ in range(2)] == [False, True]


async def test_meters_of_inactive_users_are_removed() -> None:
    now = 0.0
    meters = MemoryMeters(lambda: now)
    bench = Bench()
    bench.limit(TenantLimits(each_subject=SubjectLimits(requests_per_minute=60)))
    bench.add(meters)
    for number in range(25_000):
        now = float(number)
        await bench.use(Subject("acme", str(number)))
    assert meters.count <= 10_100


async def test_meters_in_use_are_not_searched_for_idle_ones_at_each_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that vouches can invent names, and all tenants would wait for the searches."""
    searched = 0

    def is_idle(_meter: Meter, _now: float) -> bool:
        nonlocal searched
        searched += 1
        return False

    monkeypatch.setattr(Meter, "is_idle", is_idle)
    bench = Bench()
    bench.limit(TenantLimits(each_subject=SubjectLimits(requests_per_minute=1)))
    bench.add(MemoryMeters(lambda: 0.0))
    for number in range(MAX_METERS + 100):
        await bench.use(Subject("rival", f"user/{number}"))
    assert searched <= 2 * MAX_METERS


def test_the_smallest_context_counts() -> None:
    bench = Bench()
    bench.limit(TenantLimits(max_context=1000, each_subject=SubjectLimits(max_context=500)))
    assert Quotas(bench, MemoryMeters(), memory_ledger()).max_context(ANN) == 500
    assert Quotas(None, MemoryMeters(), memory_ledger()).max_context(ANN) is None


@pytest.mark.parametrize("kind", [ChargeKind.CONTINUED, ChargeKind.INHERITED])
async def test_no_budget_ends_an_answer_that_has_begun_but_it_is_throttled(kind: ChargeKind) -> None:
    bench, ledger = Bench(), memory_ledger()
    bench.limit(TenantLimits(tokens_per_day=100, throttle_at=0.5, each_subject=SubjectLimits(tokens_per_day=100)))
    quotas = Quotas(bench, MemoryMeters(lambda: bench.now), ledger)
    again = Charge(ANN, 1, 0, kind=kind)
    assert (await quotas.take(again)).throttles_tenant is False
    ledger.note(RequestId("one"), ANN, Work("tiny"), Tokens(1, 60, 0, 40))
    with pytest.raises(BudgetError):
        await quotas.take(Charge(ANN, 1, 0, uses_model=True))
    lease = await quotas.take(again)
    assert (lease.throttles_tenant, lease.throttles_subject) == (True, False)


async def test_headers_show_the_remainder_of_the_tightest_limit(bench: Bench) -> None:
    bench.limit(
        TenantLimits(requests_per_minute=100, each_subject=SubjectLimits(requests_per_minute=6, tokens_per_minute=60))
    )
    headers = dict((await bench.take(tokens=30)).headers())
    assert headers == {
        b"x-ratelimit-limit-requests": b"6",
        b"x-ratelimit-remaining-requests": b"5",
        b"x-ratelimit-reset-requests": b"10.000s",
        b"x-ratelimit-limit-tokens": b"60",
        b"x-ratelimit-remaining-tokens": b"30",
        b"x-ratelimit-reset-tokens": b"30.000s",
    }
    with pytest.raises(LimitedError) as refused:
        await bench.take(tokens=50)
    assert dict(refused.value.headers) == headers


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 2000)), max_size=50))
def test_a_bucket_never_gives_more_than_its_rate_allows(rate: int, steps: list[tuple[float, float]]) -> None:
    now, taken = 0.0, 0.0
    bucket = Bucket(now)
    for pause, amount in steps:
        now += pause
        amount = min(amount, rate)
        if not bucket.wait_s(amount, rate, now):
            bucket.take(amount, rate, now)
            taken += amount
        assert taken <= rate + now * rate / 60 + 1e-6
