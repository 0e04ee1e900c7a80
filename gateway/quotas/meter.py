"""What one tenant or one user has used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gateway.quotas.bucket import Bucket

if TYPE_CHECKING:
    from gateway.quotas.rules import Quota

# When somebody's request may end is not known; this is what we tell those who wait for it.
BUSY_WAIT_S = 1.0


class Meter:
    """The buckets of one quota, and how many requests are open."""

    __slots__ = ("open", "quota", "requests", "tokens")

    def __init__(self, quota: Quota, now: float) -> None:
        """Begin with nothing used."""
        self.open = 0
        self.adopt(quota, now)

    def adopt(self, quota: Quota, now: float) -> None:
        """Begin anew with other limits; open requests stay open."""
        self.quota = quota
        self.requests = Bucket(quota.requests_per_minute, now) if quota.requests_per_minute else None
        self.tokens = Bucket(quota.tokens_per_minute, now) if quota.tokens_per_minute else None

    def obstacle(self, requests: int, tokens: int, now: float) -> tuple[str, float] | None:
        """Return what stands in the way of so many requests with so many tokens, and for how many seconds."""
        quota = self.quota
        if quota.concurrent is not None and self.open + requests > max(quota.concurrent, requests * (self.open == 0)):
            return f"{quota.concurrent} requests at the same time", BUSY_WAIT_S
        if self.requests is not None and (wait := self.requests.wait_s(requests, now)):
            return f"{quota.requests_per_minute} requests per minute", wait
        if self.tokens is not None and (wait := self.tokens.wait_s(tokens, now)):
            return f"{quota.tokens_per_minute} tokens per minute", wait
        return None

    def take(self, requests: int, tokens: int, now: float) -> None:
        """Open so many requests that announce so many tokens."""
        self.open += requests
        if self.requests is not None:
            self.requests.take(requests, now)
        if self.tokens is not None:
            self.tokens.take(tokens, now)

    def settle(self, requests: int, tokens: int, now: float) -> None:
        """Close requests that used `tokens` more than announced (less, if negative)."""
        self.open -= requests
        if self.tokens is not None:
            self.tokens.take(tokens, now)

    def is_idle(self, now: float) -> bool:
        """Whether a new meter would be the same."""
        buckets = (self.requests, self.tokens)
        return not self.open and all(bucket is None or not bucket.full_in_s(now) for bucket in buckets)


def rate_headers(meters: list[Meter], now: float) -> list[tuple[bytes, bytes]]:
    """Return `x-ratelimit-*` headers; of several limits those that are nearest."""
    headers = []
    kinds = {
        b"requests": [meter.requests for meter in meters if meter.requests is not None],
        b"tokens": [meter.tokens for meter in meters if meter.tokens is not None],
    }
    for kind, buckets in kinds.items():
        if not buckets:
            continue
        nearest = min(buckets, key=lambda bucket: bucket.level(now))
        headers += [
            (b"x-ratelimit-limit-" + kind, b"%d" % nearest.per_minute),
            (b"x-ratelimit-remaining-" + kind, b"%d" % max(0, math.floor(nearest.level(now)))),
            (b"x-ratelimit-reset-" + kind, b"%.3fs" % nearest.full_in_s(now)),
        ]
    return headers
