"""Counts the hits of a simulated cache by user, the delays of promotions, and the costs of operations."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.types import Subject, View
from deploy.evaluation.bench.records import Segment
from services.scheduler.cache.types import CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deploy.evaluation.bench.prompts import Contents
    from deploy.evaluation.bench.records import BenchRequest
    from deploy.evaluation.bench.workloads.ideal import IdealCache
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.pages import PageAllocator

OPERATIONS = ("peek", "commit", "insert", "release", "evict", "advance")
TENANT = "tenant"
# A view of the users' tenant that sends no requests, to check whether a prompt is shared.
OBSERVER = View(Subject(TENANT, "observer"))
ONE_MORE = Segment("one more", 1)


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one kind of operation in microseconds; other load affects the mean more than the median."""

    count: int
    median_us: float
    mean_us: float

    @property
    def total_s(self) -> float:
        """Total time of all operations of this kind, in seconds."""
        return self.count * self.mean_us / 1e6


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """The figures of one mode. Tokens are prompt tokens; pages are physical pages that are not free."""

    requests: int
    refused: int
    input_tokens: int
    hit_tokens: int
    ideal_own: int
    ideal_shared: int
    crossing_tokens: int
    """Tokens found in prompts of others without sufficient evidence; must be 0 in all modes but shared."""
    fairness: float
    """Jain's index of the users' hit rates: 1 if all are equal, 1 / n if one has everything."""
    users: int
    mean_pages: float
    last_pages: int
    nodes: int
    promotions: int
    quarantines: int
    demotions: int
    """All of them are false, as the workloads contain no probing."""
    prompts_seen: int
    promoted_after_s: tuple[float, ...]
    """For each system prompt that became public: seconds from its first request to the epoch in which it did."""
    costs: dict[str, Cost]

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the cache."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class SimulatedServer(Protocol):
    """The state of a simulated server that a tally reads."""

    allocator: PageAllocator
    cache: PrefixCache
    contents: Contents
    now: float


@dataclass(slots=True)
class _User:
    asked: int = 0
    found: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """Prompts of others that a mode lets a user find: those with sufficient evidence, and those that are pinned."""

    by_evidence: bool
    by_pins: bool


@dataclass(slots=True)
class _Sums:
    ideal_own: int = 0
    ideal_shared: int = 0
    crossing: int = 0
    refused: int = 0


class Tally:
    """Collects the events of a simulation; `figures` returns the result."""

    def __init__(self, rules: Rules, ideal: IdealCache) -> None:
        """Compare hits with `rules` and with an ideal cache."""
        self._rules = rules
        self._ideal = ideal
        self._sums = _Sums()
        self._users: dict[str, _User] = {}
        self._times = {name: array("q") for name in OPERATIONS}
        self._pages = array("q")
        # System prompts, the first segments of prompts: all keys, and the start times of those that are not public yet.
        self._seen: set[str] = set()
        self._pending: dict[str, tuple[float, Segment]] = {}
        self._fresh: list[Segment] = []
        self._promoted: list[float] = []

    def note(self, operation: str, nanoseconds: int) -> None:
        """Record the duration of an operation."""
        self._times[operation].append(nanoseconds)

    def refuse(self, _request: BenchRequest) -> None:
        """Record a request that is too large for memory."""
        self._sums.refused += 1

    def start(self, request: BenchRequest, matched: int, now: float) -> None:
        """Record the start of a request with `matched` cached tokens."""
        hit = self._ideal.ask(request)
        self._sums.ideal_own += hit.own
        self._sums.ideal_shared += hit.shared_by_all
        first = request.segments[0]
        evident = hit.evident if self._rules.by_evidence else 0
        pinned = first.tokens if self._rules.by_pins and first.role == "system" else 0
        self._sums.crossing += max(matched - max(hit.own, evident, pinned), 0)
        user = self._users.setdefault(request.user or "anonymous", _User())
        user.asked += request.input_tokens
        user.found += matched
        if first.role == "system" and first.key not in self._seen:
            self._seen.add(first.key)
            self._pending[first.key] = now, first
            self._fresh.append(first)

    def close_epoch(self, nanoseconds: int, server: SimulatedServer) -> None:
        """Record the state after an epoch boundary, and the duration of the boundary."""
        self.note("advance", nanoseconds)
        self._pages.append(used_pages(server))
        cache, now = server.cache, server.now
        for key, (since, segment) in list(self._pending.items()):
            # The last token of a prompt never matches, so one more is appended.
            ids = server.contents.ids((segment, ONE_MORE))
            if cache.peek(OBSERVER, ids) >= segment.tokens // cache.page_size * cache.page_size:
                del self._pending[key]
                self._promoted.append(now - since)
        fresh, self._fresh = self._fresh, []
        if self._rules.by_pins:
            for segment in fresh:
                cache.pin(server.contents.ids((segment,)))

    def figures(self, server: SimulatedServer) -> CacheFigures:
        """Return the figures of the whole simulation."""
        events = server.cache.events
        asked = np.array([user.asked for user in self._users.values()], np.float64)
        found = np.array([user.found for user in self._users.values()], np.float64)
        return CacheFigures(
            requests=len(self._times["commit"]),
            refused=self._sums.refused,
            input_tokens=int(asked.sum()),
            hit_tokens=int(found.sum()),
            ideal_own=self._sums.ideal_own,
            ideal_shared=self._sums.ideal_shared,
            crossing_tokens=self._sums.crossing,
            fairness=jain_index(found / np.maximum(asked, 1)),
            users=len(self._users),
            mean_pages=float(np.mean(self._pages)) if self._pages else 0.0,
            last_pages=used_pages(server),
            nodes=sum(1 for _ in server.cache.dump()),
            promotions=events.count(CacheEventKind.PROMOTED),
            quarantines=events.count(CacheEventKind.QUARANTINED),
            demotions=events.count(CacheEventKind.DEMOTED),
            prompts_seen=len(self._seen),
            promoted_after_s=tuple(self._promoted),
            costs={name: _cost(times) for name, times in self._times.items() if times},
        )


def used_pages(server: SimulatedServer) -> int:
    """Return the number of pages that running rows or live nodes hold."""
    return server.allocator.capacity - server.allocator.free_pages - server.cache.soft_free_pages


def jain_index(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return (Σx)² / (n Σx²) (Jain, Chiu and Hawe, 1984); 1 if all values are 0."""
    array = np.asarray(values, np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / (len(array) * squares) if squares else 1.0


def _cost(times: array[int]) -> Cost:
    microseconds = np.frombuffer(times, np.int64) / 1e3
    return Cost(len(times), float(np.median(microseconds)), float(microseconds.mean()))
