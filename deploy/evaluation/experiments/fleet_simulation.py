"""The share of requests that find their application's prompt cached, by the number of scheduler groups.

Run as `python -m deploy.evaluation.experiments.fleet_simulation`; requires a redis-server. An application with 100
users, each of whom asks once in five minutes, starts on empty groups that each decide alone, and on groups that share a
state. Caches, routing and the exchange with the state server are the services' own; time is simulated, epochs of the
groups begin at different times, and the groups are idle otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog
from pydantic import SecretStr
from rich.table import Table

from common.fleet.state import open_fleet
from common.settings import CacheSettings, FleetSettings
from common.types import ReplyTo, RequestId, ScheduleRequest, Subject, SubscriberId, View
from deploy.evaluation.bench.report import output_console
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.fleet_desk import POLL_INTERVAL_S, FleetDesk, rules_of
from services.tokenizer.routing.policies import PrefixAware, RoutingCandidate, affinity_key
from services.tokenizer.routing.shared_prefixes import LOOK_INTERVAL_S, FleetPrefixes, NoSharedPrefixes
from tests.fakes.redis_process import temporary_redis

if TYPE_CHECKING:
    from common.fleet.names import FleetKeys
    from common.fleet.state import FleetState
    from services.tokenizer.routing.shared_prefixes import SharedPrefixes

PAGE_SIZE = 16
VOCABULARY = 49_000
PAGES = 8192
# No multiple of the depths at which evidence is counted.
PROMPT_TOKENS, OWN_TOKENS = 1500, 100
WINDOW_S, EPOCH_S = 300.0, 10.0
LOAD_FACTOR = 1.25
# A request has found its prompt if it had this share of it cached.
FOUND = 0.85
# Time is simulated, so a busy machine must not make the server seem away.
PATIENCE_S = 600.0

Action = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Shares of requests that found the prompt, and of the prompt's tokens that were cached."""

    found: float
    cached: float


@dataclass(slots=True)
class Simulation:
    """One application on a number of groups."""

    groups: int
    users: int
    seed: int
    url: str | None
    now: float = 0.0
    cached: list[float] = field(default_factory=list)
    events: list[tuple[float, int, Action]] = field(default_factory=list)
    planned: int = 0

    async def run(self) -> FleetOutcome:
        """Run for one window."""
        chance = random.Random(self.seed)
        fleet = FleetSettings()
        if self.url is not None:
            # Another secret for each simulation, so that it starts with an empty state.
            secret = f"simulation of {self.groups} groups, number {self.seed:08d}"
            fleet = FleetSettings(state=SecretStr(self.url), secret=SecretStr(secret))
        async with contextlib.AsyncExitStack() as stack:

            def joined() -> tuple[FleetState, FleetKeys] | None:
                opened = open_fleet(fleet, PATIENCE_S)
                if opened is not None:
                    stack.push_async_callback(opened[0].close)
                return opened

            rules = CacheConfig(has_fleet=self.url is not None)
            caches = [RadixCache(PageAllocator(PAGES), PAGE_SIZE, rules) for _ in range(self.groups)]
            for cache in caches:
                self._plan_epochs(cache, joined(), chance.uniform(0, EPOCH_S))
            opened = joined()
            prefixes = NoSharedPrefixes() if opened is None else FleetPrefixes(*opened, lambda: self.now)
            self._plan_requests(caches, prefixes, chance)
            while self.events:
                self.now, _, action = heapq.heappop(self.events)
                await action()
        shares = np.array(self.cached)
        return FleetOutcome(float((shares >= FOUND).mean()), float(shares.mean()))

    def _plan(self, at: float, action: Action) -> None:
        heapq.heappush(self.events, (at, self.planned, action))
        self.planned += 1

    def _plan_epochs(self, cache: RadixCache, opened: tuple[FleetState, FleetKeys] | None, offset: float) -> None:
        """Plan the boundaries of a group's epochs, and the polls before and after each: others change little."""
        desk = None if opened is None else FleetDesk(*opened, rules_of(CacheSettings()), lambda: cache)
        for epoch in range(int(WINDOW_S / EPOCH_S)):
            begin = offset + epoch * EPOCH_S
            self._plan(begin, partial(_advance, cache, epoch + 1))
            if desk is not None:
                self._plan(begin + POLL_INTERVAL_S, desk.poll)
                self._plan(begin + EPOCH_S - POLL_INTERVAL_S, desk.poll)

    def _plan_requests(self, caches: list[RadixCache], prefixes: SharedPrefixes, chance: random.Random) -> None:
        prompt = [chance.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for user in range(self.users):
            own = [chance.randrange(VOCABULARY) for _ in range(OWN_TOKENS)]
            request = ScheduleRequest(
                RequestId(f"{user}"),
                View(Subject("tenant", f"user-{user}")),
                ReplyTo(SubscriberId("gateway")),
                np.array([*prompt, *own], np.int32),
            )
            self._plan(chance.uniform(0, WINDOW_S), partial(self._serve, request, caches, prefixes))
        if isinstance(prefixes, FleetPrefixes):
            for number in range(int(WINDOW_S / LOOK_INTERVAL_S)):
                self._plan(number * LOOK_INTERVAL_S, prefixes.look)

    async def _serve(self, request: ScheduleRequest, caches: list[RadixCache], prefixes: SharedPrefixes) -> None:
        candidates = [RoutingCandidate(f"group-{number}:50052", 0) for number in range(len(caches))]
        chosen = PrefixAware(LOAD_FACTOR).choose(affinity_key(request), candidates, prefixes.find(request))
        cache = caches[int(chosen.removeprefix("group-").removesuffix(":50052"))]
        ids, allocator = request.token_ids, cache.store.allocator
        lock = cache.commit(request.view, ids)
        fresh = allocator.try_allocate(-(-len(ids) // PAGE_SIZE) - len(lock.pages))
        assert fresh is not None, "the caches are large enough"
        table = np.concatenate([lock.pages, fresh])
        self.cached.append(min(1.0, lock.matched_tokens / (PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE)))
        cache.release(cache.insert(lock, ids, table, len(ids)).lock)
        allocator.release(table)


async def _advance(cache: RadixCache, epoch: int) -> None:
    cache.advance(epoch)


async def simulate(groups: int, users: int, runs: int, url: str | None) -> FleetOutcome:
    """Return the means of several runs."""
    outcomes = [await Simulation(groups, users, seed, url).run() for seed in range(runs)]
    return FleetOutcome(sum(each.found for each in outcomes) / runs, sum(each.cached for each in outcomes) / runs)


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 16, 125])
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    # Hundreds of desks would announce their connections.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    table = Table(box=None)
    for name in ("groups", "alone: found", "tokens cached", "with fleet.state: found", "tokens cached"):
        table.add_column(name, justify="right")
    with temporary_redis() as server:
        for groups in arguments.groups:
            alone = asyncio.run(simulate(groups, arguments.users, arguments.runs, None))
            shared = asyncio.run(simulate(groups, arguments.users, arguments.runs, server.url))
            shares = (alone.found, alone.cached, shared.found, shared.cached)
            table.add_row(f"{groups}", *(f"{share:.0%}" for share in shares))
    output_console().print(table)


if __name__ == "__main__":
    main()
