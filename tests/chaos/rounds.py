"""One round of the campaign: a fault under load, and what it cost."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from tests.chaos.faults import BrokenPromiseError
from tests.chaos.load import Case, Exchange, Load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.faults import Fault
    from tests.chaos.system import System

# The load goes on for this long after the fault.
AFTERWARDS_S = 2.0
RECOVERY_S = 180.0
FINISH_S = 150.0
IDLE_S = 45.0
# Beyond the time that the fault itself takes; with two groups at all.
PAUSE_GOAL_S = 2.0
SHOWN_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round cost; `problems` are the first ones of each kind, in words."""

    fault: str
    requests: int
    lost: int
    wrong: int
    leaked: int
    pause_p50_s: float
    pause_max_s: float
    # The pause that is within the goal.
    pause_goal_s: float
    seconds: float
    problems: tuple[str, ...] = ()
    # Whether the system can take part in another round.
    is_sound: bool = True

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, wrong or leaked."""
        return not (self.lost or self.wrong or self.leaked)

    @property
    def is_quick(self) -> bool:
        return self.pause_max_s <= self.pause_goal_s


@dataclass(slots=True)
class Judgement:
    """Counts what happened to requests."""

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, exchange: Exchange, reference: Exchange, reconnects: int) -> None:
        """Judge one request, whose client may have had to reconnect `reconnects` times."""
        name = exchange.case.name
        if exchange.failure is not None:
            self.lost.append(f"lost: {name}: {exchange.failure}")
        elif exchange.reconnects > reconnects:
            self.lost.append(f"lost: {name}: its connection broke {exchange.reconnects} times")
        elif (difference := exchange.difference(reference)) is not None:
            self.wrong.append(f"wrong: {name}: {difference}")


async def run_round(
    system: System, fault: Fault, requests: Sequence[Case], references: Mapping[str, Exchange]
) -> Outcome:
    """Apply a fault under load and return what it cost, once everything is idle again or should have been."""
    started = time.monotonic()
    # Without a shared state, gateways record answers in their memory.
    forgets = fault.setting == "disk"
    load = Load(
        system.url,
        requests,
        # Prompts that are cached are not computed by another group.
        has_new_users=system.divided,
        expects_replacement=fault.reconnects > 0,
        forgets=forgets,
    )
    load.start()
    judgement, own_s, is_sound = Judgement(), 0.0, True
    began_at = started
    try:
        await load.until_flowing()
        began_at = time.monotonic()
        if fault.ends:
            load.hold()
        own_s = await fault.inject(system)
        if not fault.ends:
            await system.until_ready(RECOVERY_S)
            await asyncio.sleep(AFTERWARDS_S)
    except TimeoutError:
        is_sound = False
        judgement.lost.append("lost: the system did not serve again")
    except (BrokenPromiseError, httpx.HTTPError) as error:
        judgement.lost.append(f"lost: {error}")
    finally:
        ended_at = time.monotonic()
        await load.finish(FINISH_S)
    for exchange in load.exchanges:
        judgement.add(exchange, references[exchange.case.name], fault.reconnects)
    leaks = await _until_idle(system)
    pauses = [exchange.pause_s for exchange in load.exchanges if _overlaps(exchange, began_at, ended_at)]
    return Outcome(
        fault=fault.name,
        requests=len(load.exchanges),
        lost=len(judgement.lost),
        wrong=len(judgement.wrong),
        leaked=len(leaks),
        pause_p50_s=statistics.median(pauses) if pauses else 0.0,
        pause_max_s=max(pauses, default=0.0),
        pause_goal_s=PAUSE_GOAL_S + (0.0 if system.has_another_group and _is_of_a_group(fault) else own_s),
        seconds=time.monotonic() - started,
        problems=tuple(
            problem for kind in (judgement.lost, judgement.wrong, leaks) for problem in kind[:SHOWN_PROBLEMS]
        ),
        is_sound=is_sound and not leaks and not fault.ends,
    )


def _is_of_a_group(fault: Fault) -> bool:
    """Whether another group can serve in the meantime."""
    return "scheduler" in fault.name or "worker" in fault.name


def _overlaps(exchange: Exchange, began_at: float, ended_at: float) -> bool:
    return exchange.started_at < ended_at and (exchange.ended_at or ended_at) > began_at


async def _until_idle(system: System) -> list[str]:
    """Wait until no service holds anything for a request; return what they still hold after a while."""
    give_up_at = time.monotonic() + IDLE_S
    while (found := await system.leaks()) and time.monotonic() < give_up_at:  # noqa: ASYNC110
        await asyncio.sleep(0.25)
    return [f"leaked: {each}" for each in found]
