"""Lets a layout answer random requests while its services are killed, and compares it with a single rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.types import GroupRole
from deploy.evaluation.bench.results import ResultSheet
from tests.e2e.byte_models import save_byte_model
from tests.layouts.arrangements import ARRANGEMENTS, ONE, Arrangement, served_as
from tests.layouts.judgement import Judge
from tests.layouts.kills import Killer
from tests.layouts.load import Load, requests_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from deploy.evaluation.bench.results import Provenance, Result
    from tests.layouts.load import Answer

BENCHMARK = "layouts"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One layout's answers beside those of a single rank.

    Requests that a service refused while it restarted are repeated and counted in `refusals`. A `tie` is a token in
    whose place another one is as likely but for rounding; `differences` are all others. `seconds` include the start of
    the services and the answers of the single rank.
    """

    layout: str
    requests: int
    greedy: int
    kills: int
    refusals: int
    differences: int
    ties: int
    seconds: float
    # Why the first answers differ, and what else was not as it must be.
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.layout}: {self.requests} requests ({self.greedy} greedy), {self.kills} kills, "
            f"{self.refusals} refusals, {self.differences} differences, {self.ties} ties, {self.seconds:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    bodies: Sequence[Mapping[str, Any]]
    expected: Sequence[Answer]
    answers: Sequence[Answer]
    refusals: int
    killed: Sequence[str]
    # Pages that the last group has read from others.
    fetched: int


class LayoutRuns:
    """Runs layouts one after the other, with models that are written once."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        """Keep models and sockets in `root`, whose path must be short; `seed` draws the requests."""
        self._root = root
        self._seed = seed
        self._checkpoints: dict[str, Path] = {}

    def run(self, name: str, count: int) -> Outcome:
        """Send `count` requests to a single rank, and to a layout while its services are killed."""
        arrangement, started = ARRANGEMENTS[name], time.monotonic()
        checkpoint = self._checkpoint(arrangement.family)
        ran = self._answer(name, arrangement, checkpoint, count)
        judge = Judge(checkpoint, is_exact=arrangement.is_exact)
        differences = judge.differences(ran.bodies, ran.answers, ran.expected)
        return Outcome(
            name,
            len(ran.answers),
            sum(not body["temperature"] for body in ran.bodies),
            len(ran.killed),
            ran.refusals,
            len(differences),
            judge.ties,
            time.monotonic() - started,
            (*differences[:5], *_missed(arrangement, ran, judge.ties)),
        )

    def _checkpoint(self, family: str) -> Path:
        if family not in self._checkpoints:
            self._checkpoints[family] = save_byte_model(self._root / family, ONE[family])
        return self._checkpoints[family]

    def _answer(self, name: str, arrangement: Arrangement, checkpoint: Path, count: int) -> _Run:
        bodies = requests_of(name, count, self._seed)
        with served_as(Arrangement(arrangement.family), checkpoint, self._root) as served:
            expected = Load(served, bodies).run()
        with served_as(arrangement, checkpoint, self._root) as served:
            killer, load = Killer(served, name), Load(served, bodies)
            answers = load.run(killer.disturb)
            wait_until(killer.is_quiet, what=lambda: f"{name}: without requests, leases or pages in use")
            killer.note_fetched()
        return _Run(bodies, expected, answers, load.refusals, killer.killed, killer.fetched)


def _missed(arrangement: Arrangement, ran: _Run, ties: int) -> list[str]:
    """Return the reasons for which a run shows less than it says."""
    has_roles = any(group.role is not GroupRole.BOTH for group in arrangement.groups)
    cases = {
        f"{len(ran.answers)} answers and {len(ran.expected)} of a single rank": len(ran.answers) != len(ran.expected),
        "nothing was killed": not ran.killed,
        "no page came from another group": has_roles and not ran.fetched,
        "more ties than rounding explains": ties > 1 + len(ran.answers) // 500,
    }
    return [problem for problem, is_so in cases.items() if is_so]


def results_of(outcomes: Iterable[Outcome], origin: Provenance) -> list[Result]:
    """Return the figures of each layout, labelled with its name."""
    results: list[Result] = []
    for outcome in outcomes:
        arrangement = ARRANGEMENTS[outcome.layout]
        sheet = ResultSheet(BENCHMARK, f"{ONE[arrangement.family]} (tiny)", arrangement.ranks, origin, outcome.layout)
        for name in ("requests", "greedy", "kills", "refusals", "differences", "ties"):
            sheet.add(name, getattr(outcome, name), name if name != "greedy" else "requests")
        sheet.add("duration", outcome.seconds, "s")
        results += sheet.results
    return results
