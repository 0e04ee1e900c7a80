"""Attacks a server that serves others again and again, at little cost to them, and reports how each run ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.evaluation.attack.allowance import BudgetSpentError
from deploy.evaluation.attack.prober import AttackError
from deploy.evaluation.bench.target import TargetError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from deploy.evaluation.attack.campaign import AttackReport

# Those that are exact, and send few requests, which need not be fast.
SCHEDULED_ORACLES = ("pairs", "sybils", "boundary", "revocation", "names", "isolation", "pages")


@dataclass(frozen=True, slots=True)
class AttackRun:
    """The end of a run: when, at how many requests, and why it did not come to its end; times in seconds since 1970.

    `finished_unix_s` is the end of the last run that came to its end; None if none has.
    """

    every_s: float
    started_unix_s: float
    finished_unix_s: float | None
    requests: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Findings of one run, and the requests that it took; `error` says why it ended early."""

    report: AttackReport | None
    requests: int
    error: str | None = None


async def attack_repeatedly(
    attempt: Callable[[], Awaitable[Attempt]],
    finish: Callable[[AttackRun], None],
    every_s: float,
    runs: int | None,
    last_finished_s: float | None = None,
) -> list[Attempt]:
    """Make `attempt`s that begin `every_s` seconds after each other, or at once if one takes longer.

    Args:
        attempt: One run.
        finish: Is told about each run at its end.
        every_s: The interval.
        runs: The number of runs; None: until cancelled.
        last_finished_s: The end of the last complete run of an earlier process.

    Returns:
        The attempts, if their number is limited, otherwise never.
    """
    attempts: list[Attempt] = []
    finished_s = last_finished_s
    while True:
        started_s, began = time.time(), time.monotonic()
        made = await attempt()
        if made.error is None:
            finished_s = time.time()
        finish(AttackRun(every_s, started_s, finished_s, made.requests, made.error))
        if runs is not None:
            attempts.append(made)
            if len(attempts) >= runs:
                return attempts
        await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))


async def attempted(attack: Callable[[], Awaitable[AttackReport]], requests: Callable[[], int]) -> Attempt:
    """Run an attack; a server that cannot be attacked is its result, as the next run may find it well."""
    try:
        return Attempt(await attack(), requests())
    except (AttackError, BudgetSpentError, TargetError) as error:
        return Attempt(None, requests(), str(error))
