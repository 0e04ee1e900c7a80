"""Limits of tenants and users, on a clock that the tests turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigurationError
from common.types import Subject
from gateway.quotas.bucket import Bucket
from gateway.quotas.quotas import Charge, Lease, LimitedError, Quotas
from gateway.quotas.rules import Quota, Rules, TenantQuota, load_rules

if TYPE_CHECKING:
    from pathlib import Path

ANN, BOB = Subject("acme", "ann"), Subject("acme", "bob")


class Bench:
    """Quotas with rules and a clock to change."""

    def __init__(self, quota: TenantQuota) -> None:
        self.value = Rules(default=quota)
        self.now = 0.0
        self.quotas = Quotas(self, lambda: self.now)

    def take(self, subject: Subject = ANN, requests: int = 1, tokens: int = 0) -> Lease:
        return self.quotas.take(Charge(subject, requests, tokens))

    def is_refused(self, subject: Subject = ANN, tokens: int = 0) -> bool:
        try:
            self.take(subject, tokens=tokens).settle(0)
        except LimitedError:
            return True
        return False


def test_requests_per_minute_refill_steadily() -> None:
    bench = Bench(TenantQuota(requests_per_minute=60))
    for _ in range(60):
        bench.take().settle(0)
    with pytest.raises(LimitedError, match="60 requests per minute") as refused:
        bench.take()
    assert refused.value.retry_after_ms == 1000
    bench.now = 1.0
    assert not bench.is_refused()
    assert bench.is_refused()


def test_tokens_are_charged_as_announced_and_corrected_at_the_end() -> None:
    bench = Bench(TenantQuota(tokens_per_minute=600))
    lease = bench.take(tokens=500)
    assert bench.is_refused(tokens=200)
    lease.settle(100)
    assert not bench.is_refused(tokens=500)
    bench.take(tokens=10).settle(5000)
    assert bench.is_refused(tokens=1)


def test_more_than_a_minutes_budget_passes_when_the_bucket_is_full() -> None:
    bench = Bench(TenantQuota(tokens_per_minute=100))
    lease = bench.take(tokens=100_000)
    lease.settle(100_000)
    assert bench.is_refused(tokens=1)


def test_concurrent_requests_count_until_they_end() -> None:
    bench = Bench(TenantQuota(concurrent=2))
    first, _ = bench.take(), bench.take()
    assert bench.is_refused()
    first.settle(0)
    assert not bench.is_refused()


def test_a_user_at_the_limit_does_not_hinder_the_others_but_the_tenant_is_bounded() -> None:
    bench = Bench(TenantQuota(requests_per_minute=3, each_user=Quota(requests_per_minute=2)))
    assert [bench.is_refused(ANN) for _ in range(3)] == [False, False, True]
    assert [bench.is_refused(BOB) for _ in range(2)] == [False, True]
    assert not bench.is_refused(Subject("other", "ann"))


def test_what_is_refused_takes_nothing() -> None:
    bench = Bench(TenantQuota(requests_per_minute=100, concurrent=1, each_user=Quota(requests_per_minute=1)))
    bench.take(ANN).settle(0)
    for _ in range(200):
        assert bench.is_refused(ANN)
    assert not bench.is_refused(BOB)


def test_changed_limits_count_at_once_and_open_requests_still_do() -> None:
    bench = Bench(TenantQuota(concurrent=5))
    lease = bench.take()
    bench.value = Rules(default=TenantQuota(concurrent=1))
    assert bench.is_refused()
    lease.settle(0)
    assert not bench.is_refused()


def test_users_who_come_and_go_leave_no_trace() -> None:
    bench = Bench(TenantQuota(each_user=Quota(requests_per_minute=60)))
    for number in range(25_000):
        bench.now = float(number)
        bench.take(Subject("acme", str(number))).settle(0)
    assert len(bench.quotas._meters) <= 10_100


def test_the_smallest_context_counts() -> None:
    bench = Bench(TenantQuota(max_context=1000, each_user=Quota(max_context=500)))
    assert bench.quotas.max_context(ANN) == 500
    assert Quotas(None).max_context(ANN) is None


def test_headers_tell_what_is_left_of_the_nearest_limit() -> None:
    bench = Bench(TenantQuota(requests_per_minute=100, each_user=Quota(requests_per_minute=6, tokens_per_minute=60)))
    headers = dict(bench.take(tokens=30).headers())
    assert headers == {
        b"x-ratelimit-limit-requests": b"6",
        b"x-ratelimit-remaining-requests": b"5",
        b"x-ratelimit-reset-requests": b"10.000s",
        b"x-ratelimit-limit-tokens": b"60",
        b"x-ratelimit-remaining-tokens": b"30",
        b"x-ratelimit-reset-tokens": b"30.000s",
    }


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 2000)), max_size=50))
def test_a_bucket_never_gives_more_than_its_rate_allows(rate: int, steps: list[tuple[float, float]]) -> None:
    now, taken = 0.0, 0.0
    bucket = Bucket(rate, now)
    for pause, amount in steps:
        now += pause
        amount = min(amount, rate)
        if not bucket.wait_s(amount, now):
            bucket.take(amount, now)
            taken += amount
        assert taken <= rate + now * rate / 60 + 1e-6


def test_limits_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(
        "[default]\nconcurrent = 4\n[tenants.acme]\nmax_context = 9\n[tenants.acme.each_user]\nconcurrent = 1\n"
    )
    rules = load_rules(path)
    assert rules.of("acme") == TenantQuota(max_context=9, each_user=Quota(concurrent=1))
    assert rules.of("anyone") == TenantQuota(concurrent=4)


@pytest.mark.parametrize(
    "text", ["x", "[default]\nrequests = 1", "[default]\nconcurrent = 0", "[default]\nconcurrent = '4'"]
)
def test_malformed_limits_stop_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"limits\.toml"):
        load_rules(path)
