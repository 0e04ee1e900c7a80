"""Simulation of a server without a model: requests arrive, allocate pages, run for some time, and leave cached pages.

It calls the prefix cache like the scheduler, but without batching: memory is the only limited resource.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.types import Subject, View
from deploy.evaluation.bench.cache.tally import TENANT
from deploy.evaluation.bench.prompts import Contents
from services.scheduler.cache.factory import make_cache
from services.scheduler.cache.pages import PageAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.steps import PageIds
    from common.types import TokenIds
    from deploy.evaluation.bench.arrivals import Arrival
    from deploy.evaluation.bench.cache.tally import Tally
    from deploy.evaluation.bench.records import BenchRequest
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.factory import CacheName
    from services.scheduler.cache.types import PrefixLock


@dataclass(frozen=True, slots=True)
class Machine:
    """Capacity and speed of the simulated server; by default about an 8B model on one large GPU."""

    device_pages: int = 65_536
    page_size: int = 16
    prefill_tokens_per_s: float = 40_000.0
    token_s: float = 0.02
    epoch_seconds: float = 10.0


@dataclass(slots=True, eq=False)
class _Row:
    """A running request; `ids` are those of its prompt and its answer, `table` the pages for all of them."""

    request: BenchRequest
    ids: TokenIds
    lock: PrefixLock
    table: PageIds


class CacheSimulation:
    """Owns one cache, its pages, and the running requests."""

    def __init__(self, mode: CacheName, machine: Machine, config: CacheConfig, tally: Tally) -> None:
        """Start with an empty cache; events are counted by `tally`."""
        self.allocator = PageAllocator(machine.device_pages)
        self.cache = make_cache(mode, self.allocator, machine.page_size, config)
        self._machine = machine
        self._tally = tally
        self.contents = Contents()
        self.now = 0.0
        # Wall-clock time, so the machine must be idle: reading a thread's CPU time takes longer than some operations.
        self._clock = time.perf_counter_ns
        # Pending actions as (time, order, action), and requests that wait for memory.
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._waiting: deque[BenchRequest] = deque()

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Simulate all of `arrivals`, which must be in order, until the last request ends."""
        now = 0.0
        for arrival in arrivals:
            now = arrival.time_s
            self._catch_up(now)
            self._advance(now)
            self._waiting.append(arrival.request)
            self._admit(now)
        while self._due:
            now = self._due[0][0]
            self._catch_up(now)
            self._advance(now)
        assert not self._waiting, "waiting requests get memory when the others have ended"

    def _catch_up(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            due, _, act = heapq.heappop(self._due)
            self._advance(due)
            act(due)
            self._admit(due)

    def _advance(self, now: float) -> None:
        self.now = now
        epoch = int(now / self._machine.epoch_seconds)
        if epoch > self.cache.epoch:
            before = self._clock()
            self.cache.advance(epoch)
            self._tally.close_epoch(self._clock() - before, self)

    def _admit(self, now: float) -> None:
        while self._waiting and self._try_start(self._waiting[0], now):
            self._waiting.popleft()

    def _try_start(self, request: BenchRequest, now: float) -> bool:
        """Start a request if there is memory for its prompt and its answer; True if it started or can never fit."""
        prompt, answer = request.segments, request.answer
        ids = self.contents.ids(prompt if answer is None else (*prompt, answer))
        tokens = request.input_tokens
        # No KV is computed for the answer's last token.
        pages = -(-(len(ids) - (answer is not None)) // self._machine.page_size)
        if pages > self._machine.device_pages:
            self._tally.refuse(request)
            return True
        view = View(Subject(TENANT, request.user or "anonymous"))
        clock, prompt_ids = self._clock, ids[:tokens]
        started = clock()
        matched = self.cache.peek(view, prompt_ids)
        peeked = clock()
        if pages - matched // self._machine.page_size > self._available:
            return False
        between = clock()
        lock = self.cache.commit(view, prompt_ids)
        committed = clock()
        fresh = self._try_allocate(pages - len(lock.pages))
        if fresh is None:
            self.cache.release(lock)
            self.allocator.release(lock.pages)
            return False
        self._tally.note("peek", peeked - started)
        self._tally.note("commit", committed - between)
        self._tally.start(request, lock.matched_tokens, now)
        row = _Row(request, ids, lock, np.concatenate([lock.pages, fresh]))
        prefill_s = (tokens - lock.matched_tokens) / self._machine.prefill_tokens_per_s
        self._at(now + prefill_s, lambda due: self._prefilled(row, due))
        return True

    def _prefilled(self, row: _Row, now: float) -> None:
        self._insert(row, row.request.input_tokens)
        self._at(now + row.request.output_tokens * self._machine.token_s, lambda _: self._finish(row))

    def _finish(self, row: _Row) -> None:
        if row.request.answer is not None:
            self._insert(row, len(row.ids) - 1)
        before = self._clock()
        self.cache.release(row.lock)
        self._tally.note("release", self._clock() - before)
        self.allocator.release(row.table)

    def _insert(self, row: _Row, computed: int) -> None:
        before = self._clock()
        insertion = self.cache.insert(row.lock, row.ids[:computed], row.table, row.request.input_tokens)
        self._tally.note("insert", self._clock() - before)
        row.lock = insertion.lock
        if insertion.first_duplicate is not None:
            row.table[insertion.first_duplicate : len(insertion.pages)] = insertion.pages[insertion.first_duplicate :]
            self.allocator.exchange(insertion.duplicates, insertion.canonical)

    @property
    def _available(self) -> int:
        return self.allocator.free_pages + self.cache.soft_free_pages + self.cache.evictable_pages

    def _try_allocate(self, count: int) -> PageIds | None:
        before = self._clock()
        if count > self.allocator.free_pages:
            self.cache.evict(count - self.allocator.free_pages)
            self._tally.note("evict", self._clock() - before)
        return self.allocator.try_allocate(count)

    def _at(self, due: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (due, self._order, act))
