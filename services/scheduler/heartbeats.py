"""Heartbeats of a rank: its answers, or their absence, show whether it, its engine and its connection work."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from services.scheduler.rank import EngineFailedError, RankLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.scheduler.rank import PlanStream, Pulse, RankConnection

HEARTBEAT_S = 0.25
# A busy machine may answer late, but that is an answer.
PULSE_TIMEOUT_S = 1.0
# Heartbeats in a row in which no answer arrived, after which a rank counts as lost, with it all rows: if another group
# would serve their requests, and if they can only wait for the rank. They are counted, as a process that was stopped
# itself would measure a long time.
SILENT_BEATS = 5
SILENT_BEATS_ALONE = 40
# Heartbeats in a row in which a rank had no plan, although results of it are missing, and none arrived, after
# which these count as lost; fewer are enough if answers were missing before, as then the connection has lost messages.
IDLE_BEATS = 5
IDLE_BEATS_AFTER_SILENCE = 2


class RankSilentError(RankLostError):
    """A rank or its connection answers nothing, though nothing has broken."""


class RankWatch:
    """Sends heartbeats to a rank while the group serves.

    They use the connection of the plans, so that they also notice if it loses messages.
    """

    def __init__(self, number: int, rank: RankConnection, stream: PlanStream, timeout_s: float) -> None:
        """Begin with a rank that has answered; its engine may go `timeout_s` without progress."""
        self.health = RankHealth()
        self._number = number
        self._rank = rank
        self._stream = stream
        self._timeout_s = timeout_s

    async def run(self, has_others: Callable[[], bool], has_plans_in_flight: Callable[[], bool]) -> NoReturn:
        """Send heartbeats until they show a fault.

        Args:
            has_others: Whether another group would serve requests now, so that a silent rank is given up sooner.
            has_plans_in_flight: Whether the group's tokens of a plan are missing.

        Raises:
            RankSilentError: the rank does not answer, or has lost plans or results.
            EngineFailedError: its engine hangs.
        """
        record, stream = PulseRecord(), self._stream
        # Heartbeats that are not answered yet, with the time of the rank's last result when they were sent.
        asked: dict[asyncio.Task[Pulse | None], float] = {}
        try:
            while True:
                asked[asyncio.create_task(self._rank.pulse(PULSE_TIMEOUT_S))] = stream.last_sign
                await asyncio.sleep(HEARTBEAT_S)
                done = {task: sign for task, sign in asked.items() if task.done()}
                asked = {task: sign for task, sign in asked.items() if task not in done}
                answers = [(pulse, sign) for task, sign in done.items() if (pulse := task.result()) is not None]
                record.beat(answers, stream.last_sign, is_busy=stream.in_flight > 0)
                self.health = self.health.after(record.silent, [pulse for pulse, _ in answers])
                if record.silent >= (SILENT_BEATS if has_others() else SILENT_BEATS_ALONE):
                    raise RankSilentError(f"rank {self._number} has not answered {record.silent} heartbeats")
                age_s = max((pulse.engine_age_s for pulse, _ in answers), default=0.0)
                if has_plans_in_flight() and age_s > self._timeout_s:
                    raise EngineFailedError(f"the engine of rank {self._number} has made no progress for {age_s:.0f} s")
                if record.has_lost_plans:
                    raise RankSilentError(f"plans to rank {self._number} or its results were lost")
        finally:
            for task in asked:
                task.cancel()


@dataclass(frozen=True, slots=True)
class RankHealth:
    """State of a rank's heartbeats: how many in a row have no answer, and its last answer (None: there was none)."""

    silent_heartbeats: int = 0
    last: Pulse | None = None

    def after(self, silent: int, answers: Sequence[Pulse]) -> RankHealth:
        """Return the health after a heartbeat, with the answers that arrived during it."""
        return RankHealth(silent, answers[-1] if answers else self.last)


class PulseRecord:
    """Counts what a rank's answers to heartbeats, or their absence, say about it and its connection."""

    def __init__(self) -> None:
        """Begin with a rank that has answered."""
        # Heartbeats in a row in which no answer arrived.
        self.silent = 0
        # Those in a row in which it had no plan, although results are missing, and none arrived.
        self._idle = 0
        # Those without an answer since the last result.
        self._missed = 0
        self._last_sign = 0.0

    def beat(self, answers: Sequence[tuple[Pulse, float]], last_sign: float, *, is_busy: bool) -> None:
        """Count a heartbeat.

        Args:
            answers: Those that arrived during it, each with the time of the rank's last result before it was asked for.
            last_sign: The time of the rank's last result.
            is_busy: Whether results of the rank are missing.
        """
        if last_sign != self._last_sign or not is_busy:
            self._last_sign, self._missed, self._idle = last_sign, 0, 0
        self.silent = 0 if answers else self.silent + 1
        self._missed += not answers
        is_idle = is_busy and any(pulse.open_plans == 0 and sign == last_sign for pulse, sign in answers)
        self._idle = self._idle + 1 if is_idle else 0

    @property
    def has_lost_plans(self) -> bool:
        """Whether plans or results were lost on the way."""
        return self._idle >= (IDLE_BEATS_AFTER_SILENCE if self._missed >= SILENT_BEATS else IDLE_BEATS)
