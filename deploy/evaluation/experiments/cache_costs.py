"""Costs of the prefix cache in processor time and memory: `python -m deploy.evaluation.experiments.cache_costs`.

A request has 2,000 tokens, of which 1,600 are cached: an app's system prompt, which in the user-aware cache the tenant
shares by evidence, then five turns of the user's own. The tree around it consists of leaves of one page, ten per user.
The same requests go to the shared mode of the same tree, in turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
import tracemalloc
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from common.types import Subject, View
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, Result, ResultSheet, write_results
from services.scheduler.cache.config import CacheConfig, Mode
from services.scheduler.cache.keys import TOKEN_BYTES
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from common.types import TokenIds

PAGE_SIZE = 16
SYSTEM_TOKENS, NEW_TOKENS = 1_200, 400
TURN_TOKENS, TURNS = 80, 5
APPS = 16
NODES_PER_USER = 10
# Users whose requests are measured.
ASKING = 64
MODES = (Mode.SHARED, Mode.USER_AWARE)
OPERATIONS = ("peek", "commit", "insert", "release")
REQUEST = "peek + commit + insert"
BOUNDARY = "epoch boundary"
MEMORY_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of one user; `token_ids` [2000] int32."""

    view: View
    token_ids: TokenIds


class Grove:
    """A cache of one mode with a tree of a chosen size in it."""

    def __init__(self, mode: Mode, nodes: int, requests: int) -> None:
        """Fill the tree, with memory left for so many measured requests."""
        pages = nodes + (APPS + ASKING) * 128 + requests * 128
        self.allocator = PageAllocator(pages)
        self.cache = RadixCache(self.allocator, PAGE_SIZE, replace(CacheConfig(), mode=mode))
        self._random = np.random.default_rng(7)
        self._systems = [self._tokens(SYSTEM_TOKENS) for _ in range(APPS)]
        self._publish()
        self._histories = [self._converse(user) for user in range(ASKING)]
        self.fill(nodes)

    def fill(self, nodes: int) -> None:
        """Add leaves until there are so many nodes."""
        leaves = nodes - self.cache.store.tree.node_count
        pages = self._random.integers(0, 50_000, (max(leaves, 0), PAGE_SIZE), np.int32)
        for number in range(leaves):
            user = ASKING + number // NODES_PER_USER
            self.serve(Request(_principal(user), np.concatenate([self._system(user), pages[number]])))

    def requests(self, count: int) -> Iterator[Request]:
        """Yield requests that find all but their last 400 tokens."""
        for number in range(count):
            asking = number % ASKING
            ids = np.concatenate([self._histories[asking], self._tokens(NEW_TOKENS)])
            yield Request(_principal(asking), ids)

    def serve(self, request: Request) -> list[int]:
        """Run one request through the cache; return the nanoseconds of each of `OPERATIONS`."""
        cache, clock = self.cache, time.thread_time_ns
        times = [clock()]
        cache.peek(request.view, request.token_ids)
        times.append(clock())
        lock = cache.commit(request.view, request.token_ids)
        times.append(clock())
        fresh = self.allocator.try_allocate(len(request.token_ids) // PAGE_SIZE - len(lock.pages))
        assert fresh is not None, "memory is sized for all requests"
        table = np.concatenate([lock.pages, fresh])
        between = clock()
        lock = cache.insert(lock, request.token_ids, table, len(request.token_ids)).lock
        times.append(clock() - between + times[-1])
        between = clock()
        cache.release(lock)
        times.append(clock() - between + times[-1])
        self.allocator.release(table)
        return [after - before for before, after in pairwise(times)]

    def close_epoch(self) -> int:
        """Begin the next epoch; return the nanoseconds that took."""
        before = time.thread_time_ns()
        self.cache.advance(self.cache.epoch + 1)
        return time.thread_time_ns() - before

    def _publish(self) -> None:
        for system in self._systems:
            for number in range(self.cache.config.promotion_subjects):
                self.serve(Request(View(Subject("tenant", f"early {number}")), system))
        self.close_epoch()

    def _converse(self, user: int) -> TokenIds:
        """Let a user take its turns; return all of its tokens."""
        history = self._system(user)
        for _ in range(TURNS):
            history = np.concatenate([history, self._tokens(TURN_TOKENS)])
            self.serve(Request(_principal(user), history))
        return history

    def _system(self, user: int) -> TokenIds:
        return self._systems[user % APPS]

    def _tokens(self, count: int) -> TokenIds:
        return self._random.integers(0, 50_000, count, np.int32)


def _principal(user: int) -> View:
    return View(Subject("tenant", f"user {user}"))


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of processor time per request and operation, medians of the repeats."""

    nodes: int
    mode: Mode
    operations: dict[str, Spread]

    @property
    def request_us(self) -> float:
        """Cost of a request, without its end and its share of the epoch boundary."""
        return self.operations[REQUEST].median


def measure_costs(nodes: int, requests: int, repeats: int) -> list[Costs]:
    """Serve `requests` requests per mode and repeat, with `nodes` nodes around them."""
    groves = [Grove(mode, nodes, requests * (repeats + 1)) for mode in MODES]
    found: list[list[dict[str, float]]] = [[] for _ in MODES]
    for repeat in range(repeats + 1):
        times: list[list[list[int]]] = [[] for _ in MODES]
        for pair in zip(*(grove.requests(requests) for grove in groves), strict=True):
            for grove, request, kept in zip(groves, pair, times, strict=True):
                kept.append(grove.serve(request))
        for grove, kept, summaries in zip(groves, times, found, strict=True):
            boundary_us = grove.close_epoch() / 1e3 / requests
            if repeat:  # the first one warms up
                summaries.append({**_medians(np.array(kept)), BOUNDARY: boundary_us})
    return [
        Costs(nodes, mode, {name: Spread.of([summary[name] for summary in summaries]) for name in summaries[0]})
        for mode, summaries in zip(MODES, found, strict=True)
    ]


def _medians(times: NDArray[np.int64]) -> dict[str, float]:
    """Return the median microseconds of each operation and of a request; `times` [requests, operations], ns."""
    named = {name: float(np.median(times[:, index])) / 1e3 for index, name in enumerate(OPERATIONS)}
    return {**named, REQUEST: float(np.median(times[:, :3].sum(axis=1))) / 1e3}


def measure_memory(mode: Mode, nodes: int) -> float:
    """Return the bytes that one more node with one more page takes, beyond its key."""
    tracemalloc.start()
    grove = Grove(mode, 1_000, nodes)
    gc.collect()
    bytes_before, nodes_before = tracemalloc.get_traced_memory()[0], grove.cache.store.tree.node_count
    grove.fill(nodes)
    grove.close_epoch()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - bytes_before
    tracemalloc.stop()
    return used / (grove.cache.store.tree.node_count - nodes_before) - PAGE_SIZE * TOKEN_BYTES


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m deploy.evaluation.experiments.cache_costs", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--requests", type=int, default=1_000, help="per repeat (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args(argv)
    costs = [cost for nodes in arguments.nodes for cost in measure_costs(nodes, arguments.requests, arguments.repeats)]
    memory = {mode: measure_memory(mode, MEMORY_NODES) for mode in MODES}
    console = output_console()
    console.print(costs_table(costs))
    console.print(summary_table(costs, memory))
    if arguments.json is not None:
        command = shlex.join([*parser.prog.split(), *(sys.argv[1:] if argv is None else argv)])
        provenance = replace(Provenance.collect(()), command=command)
        write_results(arguments.json, results(costs, memory, provenance))


def costs_table(costs: Sequence[Costs]) -> Table:
    """Return all measured times."""
    table = Table(title="µs of processor time per request: median (least-largest)", title_justify="left")
    for name in ("nodes", "mode", *costs[0].operations):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for cost in costs:
        cells = (f"{spread.median:.1f} ({spread.low:.1f}-{spread.high:.1f})" for spread in cost.operations.values())
        table.add_row(f"{cost.nodes:,}", cost.mode.value, *cells)
    return table


def summary_table(costs: Sequence[Costs], memory: Mapping[Mode, float]) -> Table:
    """Return the figures that have targets."""
    table = Table(title="targets", title_justify="left")
    for name in ("figure", "measured", "target"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for nodes, ratio in ratios(costs).items():
        table.add_row(f"user_aware / shared at {nodes:,} nodes", f"{ratio:.2f}", "≤ 1.05")
    for mode in MODES:
        table.add_row(f"growth of {mode.value} over all sizes", f"{growth(costs, mode):.2f}", "≤ 1.50")
        table.add_row(f"bytes per node beyond its key, {mode.value}", f"{memory[mode]:,.0f}", "≤ 1,024")
    return table


def ratios(costs: Sequence[Costs]) -> dict[int, float]:
    """Return the cost of a request with user awareness, as a multiple of the cost without, by nodes."""
    by_size = {(cost.nodes, cost.mode): cost.request_us for cost in costs}
    return {cost.nodes: cost.request_us / by_size[cost.nodes, Mode.SHARED] for cost in costs if cost.mode is MODES[1]}


def growth(costs: Sequence[Costs], mode: Mode) -> float:
    """Return the highest cost of a request, as a multiple of the cost in the smallest tree."""
    of_mode = [cost for cost in costs if cost.mode is mode]
    return max(cost.request_us for cost in of_mode) / min(of_mode, key=lambda cost: cost.nodes).request_us


def results(costs: Sequence[Costs], memory: Mapping[Mode, float], provenance: Provenance) -> list[Result]:
    """Return everything in the form that is kept; the label says mode and size."""
    found: list[Result] = []
    for cost in costs:
        label = f"{cost.mode.value}, {cost.nodes} nodes, {cost.nodes // NODES_PER_USER} users"
        sheet = ResultSheet("cache-costs", "none", 1, provenance, label)
        for name, spread in cost.operations.items():
            sheet.add_spread(f"{name} cpu", spread, "µs")
        found += sheet.results
    for mode, used in memory.items():
        sheet = ResultSheet("cache-costs", "none", 1, provenance, mode.value)
        sheet.add("memory per node beyond its key", used, "bytes")
        sheet.add("growth of cpu per request", growth(costs, mode), "ratio")
        found += sheet.results
    sheet = ResultSheet("cache-costs", "none", 1, provenance, "user_aware / shared")
    for nodes, ratio in ratios(costs).items():
        sheet.add(f"cpu per request at {nodes} nodes", ratio, "ratio")
    return [*found, *sheet.results]


if __name__ == "__main__":
    main()
