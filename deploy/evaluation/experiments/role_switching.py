"""A simulation of a load that turns from long prompts to long outputs: roles that follow it beside fixed ones.

Run as `python -m deploy.evaluation.experiments.role_switching [--json FILE]`. GPUs, times and requests are those of
`disaggregation`; roles are decided by the tokenizer's own controller. A request is in time if its first token comes
within `MOST_TTFT_S`; times between tokens are those of all tokens.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import math
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.table import Table

from common.settings.scheduler import AutomaticRoleSettings
from common.settings.tokenizer import RoutingSettings
from common.types import GroupRole, RoleSignals
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, current_commit, write_results
from deploy.evaluation.experiments.disaggregation import (
    KV_TOKENS,
    MAX_ROWS,
    MOST_TTFT_S,
    PREFILL_MIN_TOKENS,
    PREFILL_STEP,
    Latencies,
    PromptInWork,
    SimulatedGpu,
    SimulatedRequest,
    fixed,
)
from deploy.evaluation.experiments.h200_costs import CostModel
from services.tokenizer.routing.fleet import ROLE_INTERVAL_S
from services.tokenizer.routing.roles import ObservedGroup, RoleController

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BENCHMARK, MODEL = "role_switching", "llama-3.1-8b"
GPUS = 16
# The most tokens of a pass.
STEP_TOKENS_OF = {GroupRole.PREFILL: PREFILL_STEP, GroupRole.DECODE: 512, GroupRole.BOTH: 1024}
# Prefill groups of the fixed layouts; the first one is where roles that follow the load begin.
FIXED = (11, 10, 9, 8, 7, 6)
FOLLOWS = "roles follow the load"


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind that arrive for some time, at a rate per GPU and second."""

    name: str
    draw: Callable[[Random], SimulatedRequest]
    rate: float
    seconds: float


PHASES = (
    Phase("8,192 in, 256 out", fixed(8192, 256), 2.9, 240.0),
    Phase("1,024 in, 1,024 out", fixed(1024, 1024), 4.5, 240.0),
    Phase("8,192 in, 256 out again", fixed(8192, 256), 2.9, 240.0),
)


@dataclass(slots=True)
class TurnFigures:
    """The requests that arrived in a phase, those that were in time, and the times between tokens meanwhile."""

    requests: int = 0
    in_time: int = 0
    itl: Latencies = field(default_factory=Latencies)

    @property
    def share_in_time(self) -> float:
        return self.in_time / self.requests if self.requests else 0.0


@dataclass(slots=True)
class _Draining:
    role: GroupRole
    due: float


@dataclass(slots=True)
class RoleFleet:
    """GPUs of two roles under requests in phases; without prefill groups, all do both.

    With `follows`, the load changes the roles, by the defaults of the settings.
    """

    prefill: int
    follows: bool
    phases: Sequence[Phase] = PHASES
    gpus: int = GPUS
    seed: int = 0
    # Times and descriptions of the changes that the load has asked for.
    changes: list[tuple[float, str]] = field(default_factory=list)
    _costs: CostModel = field(default_factory=CostModel)
    _groups: list[SimulatedGpu] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _planned: int = 0
    _draining: dict[int, _Draining] = field(default_factory=dict)
    _changed_at: dict[int, float] = field(default_factory=dict)
    _rules: AutomaticRoleSettings = field(default_factory=AutomaticRoleSettings)
    _random: Random = field(default_factory=Random)
    _figures: list[TurnFigures] = field(default_factory=list)

    def run(self) -> list[TurnFigures]:
        """Let all phases pass; return the figures of each."""
        self._random = Random(self.seed)
        # Names are numbers: the first groups generate.
        roles = [self._generating] * (self.gpus - self.prefill) + [GroupRole.PREFILL] * self.prefill
        self._groups = [SimulatedGpu(number, role, STEP_TOKENS_OF[role]) for number, role in enumerate(roles)]
        self._figures = [TurnFigures() for _ in self.phases]
        self._plan(0.0, self._next_arrival)
        if self.follows:
            controller = RoleController(RoutingSettings().role_settle_s)
            self._plan(0.0, lambda now: self._decide(controller, now))
        while self._events and self._events[0][0] <= self._end:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self._figures

    @property
    def _generating(self) -> GroupRole:
        return GroupRole.DECODE if self.prefill else GroupRole.BOTH

    def _plan(self, at: float, event: Callable[[float], None]) -> None:
        self._planned += 1
        heapq.heappush(self._events, (at, self._planned, event))

    @property
    def _end(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def _is_counted(self, arrived: float) -> bool:
        """Whether a request can be in time before the simulation ends."""
        return arrived + MOST_TTFT_S <= self._end

    def _phase_at(self, now: float) -> int:
        for number, phase in enumerate(self.phases):
            if now < phase.seconds:
                return number
            now -= phase.seconds
        return len(self.phases) - 1

    def _next_arrival(self, now: float) -> None:
        phase = self.phases[self._phase_at(now)]
        self._arrive(phase.draw(self._random), now)
        self._plan(now + self._random.expovariate(phase.rate * self.gpus), self._next_arrival)

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        self._figures[self._phase_at(now)].requests += self._is_counted(now)
        is_remote = self.prefill > 0 and request.missing >= PREFILL_MIN_TOKENS
        group = self._least_loaded(GroupRole.PREFILL if is_remote else self._generating)
        group.queue.append(PromptInWork(request, now, request.shared, now))
        self._wake(group, now)

    def _least_loaded(self, role: GroupRole) -> SimulatedGpu:
        groups = [each for each in self._groups if each.role is role and each.number not in self._draining]
        return min(groups, key=lambda each: each.load)

    def _wake(self, group: SimulatedGpu, now: float) -> None:
        if group.is_busy:
            return
        took = group.begin_pass(self._costs, now)
        if took is not None:
            self._plan(now + took, lambda at: self._end_pass(group, took, at))

    def _end_pass(self, group: SimulatedGpu, took: float, now: float) -> None:
        if group.rows:
            self._figures[self._phase_at(now)].itl.add(took, group.rows)
        for prompt in group.end_pass():
            if group.role is GroupRole.PREFILL:
                group.forget(prompt)
                target = self._least_loaded(GroupRole.DECODE)
                target.coming += 1
                self._plan(
                    now + self._costs.transfer_s(prompt.request.prompt, group.step_tokens),
                    self._fetched(target, prompt),
                )
            elif self._is_counted(prompt.arrived) and now - prompt.arrived <= MOST_TTFT_S:
                self._figures[self._phase_at(prompt.arrived)].in_time += 1
        self._wake(group, now)

    def _fetched(self, group: SimulatedGpu, prompt: PromptInWork) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            group.fetch(prompt, now)
            self._wake(group, now)

        return arrive

    def _decide(self, controller: RoleController, now: float) -> None:
        self._complete_changes(now)
        for change in controller.decide([self._observe(each, now) for each in self._groups], now):
            number = int(change.name)
            self._draining[number] = _Draining(change.wish.role, now + self._rules.drain_s)
            self.changes.append((now, f"{change.name} to {change.wish.role.value}: {change.wish.reason}"))
        self._plan(now + ROLE_INTERVAL_S, lambda at: self._decide(controller, at))

    def _complete_changes(self, now: float) -> None:
        for number, draining in list(self._draining.items()):
            group = self._groups[number]
            is_idle = not (group.queue or group.chunked or group.fetched or group.completing or group.rows)
            if is_idle or now >= draining.due:
                group.role = draining.role
                group.step_tokens = STEP_TOKENS_OF[group.role]
                self._changed_at[number] = now
                del self._draining[number]

    def _observe(self, group: SimulatedGpu, now: float) -> ObservedGroup:
        is_changing = group.number in self._draining
        is_settled = now - self._changed_at.get(group.number, -math.inf) >= self._rules.interval_s
        # A scheduler admits prompts as far as a step has room; here they get memory at once.
        waiting = [each for each in (*group.chunked, *list(group.queue)[:1]) if each.done == each.request.shared]
        waiting += [each for each in list(group.fetched)[:1] if _is_stuck(group, each)]
        signals = RoleSignals(
            is_settled and not is_changing,
            is_changing,
            max((now - each.arrived for each in waiting), default=0.0),
            max(group.rows / MAX_ROWS, group.reserved_tokens / KV_TOKENS),
        )
        is_busy = bool(group.queue or group.chunked or group.completing or group.rows)
        return ObservedGroup(f"{group.number:04}", group.role, is_busy, signals)


def _is_stuck(group: SimulatedGpu, prompt: PromptInWork) -> bool:
    needed = prompt.request.prompt + prompt.request.output
    return group.rows >= MAX_ROWS or group.reserved_tokens + needed > KV_TOKENS


def main() -> None:
    """Simulate and print; with `--json` also keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--changes", action="store_true", help="also print each change, and why")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fleets = {f"{prefill} of {GPUS} prefill": RoleFleet(prefill, follows=False) for prefill in FIXED}
    follower = fleets[FOLLOWS] = RoleFleet(FIXED[0], follows=True)
    fleets["all do both"] = RoleFleet(0, follows=False)
    measured = {name: fleet.run() for name, fleet in fleets.items()}
    console = output_console()
    console.print(table_of(measured))
    for at, change in follower.changes if arguments.changes else ():
        console.print(f"{at:.0f} s: {change}")
    if arguments.json:
        keep(measured, follower, arguments.json)


def share_in_time(figures: Sequence[TurnFigures]) -> float:
    """Return the share of the requests of all phases that were in time."""
    return sum(each.in_time for each in figures) / sum(each.requests for each in figures)


def table_of(measured: Mapping[str, list[TurnFigures]]) -> Table:
    """Return the figures as a table: requests in time, and time between tokens at p99."""
    table = Table("", *(phase.name for phase in PHASES), "all")
    for name, figures in measured.items():
        cells = [f"{each.share_in_time:.1%}, {1e3 * each.itl.percentile(99):.0f} ms" for each in figures]
        table.add_row(name, *cells, f"{share_in_time(figures):.1%}")
    return table


def keep(measured: Mapping[str, list[TurnFigures]], follower: RoleFleet, path: Path) -> None:
    """Write the figures to a file of results."""
    command = shlex.join(["python", "-m", f"deploy.evaluation.experiments.{BENCHMARK}", *sys.argv[1:]])
    origin = Provenance(command, current_commit(), datetime.datetime.now(datetime.UTC).date().isoformat())
    results = []
    for name, figures in measured.items():
        sheet = ResultSheet(BENCHMARK, MODEL, 1, origin, name)
        for phase, each in zip(PHASES, figures, strict=True):
            sheet.add(f"{phase.name}: in time", round(each.share_in_time, 4), "ratio")
            sheet.add(f"{phase.name}: ITL p99", round(1e3 * each.itl.percentile(99), 1), "ms")
        sheet.add("in time", round(share_in_time(figures), 4), "ratio")
        if name == FOLLOWS:
            sheet.add("changes of roles", len(follower.changes), "changes")
        results += sheet.results
    write_results(path, results)


if __name__ == "__main__":
    main()
