"""Puts the workers to sleep and wakes them: deals with the requests that run, and with those that come meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError, PandoError, UnavailableError
from common.logs import get_logger
from common.steps import SleepPart
from services.scheduler import metrics
from services.scheduler.defects import changing_state
from services.scheduler.group import GroupState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from common.audit.log import Audit
    from common.steps import SleepLevel
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.group import WorkerGroup
    from services.scheduler.loop import SchedulerLoop
    from services.scheduler.weights_desk import WeightsDesk

POLL_S = 0.02


class SleepMode(Enum):
    """Treatment of running requests; see `SleepMode` in protos/pando/v1/scheduler.proto."""

    DRAIN = "drain"
    REQUEUE = "requeue"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Slept:
    """The number of requests that ran, the memory that became free on all ranks, and the time that all took."""

    running: int = 0
    freed_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Woken:
    """Whether the workers are awake, and the time that waking took."""

    is_awake: bool
    seconds: float = 0.0


class SleepDesk:
    """Makes one change at a time."""

    def __init__(self, loop: SchedulerLoop, group: WorkerGroup, weights: WeightsDesk, audit: Audit) -> None:
        """Put `group`, which runs the plans of `loop`, to sleep; but not while `weights` replaces its weights.

        `audit` records that a request has woken it.
        """
        self._loop = loop
        self._group = group
        self._weights = weights
        self._audit = audit
        self._falling: asyncio.Task[Slept] | None = None
        self._waking: asyncio.Task[Woken] | None = None
        self._keeps_host = False
        self._log = get_logger("sleep")

    async def run(self) -> NoReturn:
        """Wake the workers whenever a request asks for it, until cancelled."""
        while True:
            await self._loop.asked_to_wake.wait()
            self._loop.asked_to_wake.clear()
            try:
                woken = await self.wake_up(tuple(SleepPart))
                self._audit.note("model.wake_up", {"cause": "request", "is_awake": woken.is_awake})
            except PandoError as error:
                self._log.warning("sleep.not_woken", reason=str(error))
                self._audit.note("model.wake_up", {"cause": "request", "error": error.code.value}, "failed")

    async def sleep(self, level: SleepLevel, mode: SleepMode, *, keep_cache: bool) -> Slept:
        """Put the workers to sleep; goes on if the caller is cancelled. A deeper level may follow.

        Args:
            level: What becomes of the weights.
            mode: What becomes of the requests that run.
            keep_cache: Whether the cache is copied to the host tier and kept there; otherwise it is dropped.

        Raises:
            InvalidRequestError: there is no host tier to keep the cache in, or other groups need the workers.
            UnavailableError: weights are replaced, the workers change already, or one was lost; they are or soon will
                be awake.
        """
        core = self._loop.core
        if self._group.shares_experts:
            raise InvalidRequestError(
                "groups that share experts (scheduler.data_parallel) cannot sleep: the others need their experts"
            )
        if self._weights.is_updating:
            raise UnavailableError("the weights are being replaced; try again when that is done", retry_after_ms=1000)
        if _runs(self._falling) or _runs(self._waking):
            raise UnavailableError("the model is being put to sleep or woken", retry_after_ms=1000)
        if self._group.sleep_level is None:
            if core is None or self._group.state is not GroupState.READY:
                raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
            if keep_cache and core.memory.loads is None:
                raise InvalidRequestError("keep_cache needs scheduler.host_tier", param="keep_cache")
            falling = self._fall_asleep(core, level, mode, keep_cache=keep_cache)
        elif level > self._group.sleep_level:
            falling = self._fall_deeper(level)
        else:
            return Slept()
        self._falling = asyncio.create_task(falling)
        return await asyncio.shield(self._falling)

    async def wake_up(self, parts: Sequence[SleepPart]) -> Woken:
        """Wake the workers; goes on if the caller is cancelled. Nothing happens if they are awake.

        Raises:
            UnavailableError: the model cannot be loaded; it sleeps on.
        """
        if _runs(self._falling) and self._falling is not None:
            await asyncio.wait([self._falling])
        if not _runs(self._waking):
            if self._group.sleep_level is None:
                return Woken(is_awake=True)
            self._waking = asyncio.create_task(self._wake(parts))
        assert self._waking is not None, "it has just begun"
        return await asyncio.shield(self._waking)

    async def _fall_asleep(self, core: SchedulerCore, level: SleepLevel, mode: SleepMode, *, keep_cache: bool) -> Slept:
        began_at, running = time.monotonic(), self._loop.count_started()
        try:
            if mode is SleepMode.DRAIN:
                self._loop.hold_new(held=True)
                await self._until(lambda: not self._loop.count_started())
            elif mode is SleepMode.ABORT:
                self._loop.abort_started()
            self._loop.hold_all(held=True, puts_back=True)
            await self._until(lambda: core.is_at_rest)
            if keep_cache and core.memory.loads is not None:
                loads = core.memory.loads
                loads.host.back_up_all()
                self._loop.wake()
                await self._until(lambda: core.is_at_rest and not loads.is_copying)
            freed = await self._group.sleep(level, keeps_host_pages=keep_cache)
            with changing_state():
                core.give_back_memory(keeps_host=keep_cache)
        finally:
            self._loop.hold_new(held=False)
            self._loop.hold_all(held=False)
        self._keeps_host = keep_cache
        return self._note(Slept(running, freed, time.monotonic() - began_at))

    async def _fall_deeper(self, level: SleepLevel) -> Slept:
        began_at = time.monotonic()
        freed = await self._group.sleep(level, keeps_host_pages=self._keeps_host)
        return self._note(Slept(0, freed, time.monotonic() - began_at))

    def _note(self, slept: Slept) -> Slept:
        metrics.SLEEP_SECONDS.observe(slept.seconds)
        metrics.SLEEP_FREED_BYTES.set(slept.freed_bytes)
        self._log.info("sleep.began", running=slept.running, freed_mib=slept.freed_bytes >> 20)
        return slept

    async def _wake(self, parts: Sequence[SleepPart]) -> Woken:
        began_at = time.monotonic()
        is_awake = await self._group.wake_up(parts)
        woken = Woken(is_awake, time.monotonic() - began_at)
        metrics.WAKE_SECONDS.observe(woken.seconds)
        self._log.info("sleep.ended", is_awake=is_awake, seconds=round(woken.seconds, 3))
        self._loop.wake()
        return woken

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for the loop.

        Raises:
            UnavailableError: the workers were lost.
        """
        while not holds():
            if self._group.state is not GroupState.READY:
                raise UnavailableError("a worker was lost before the model slept", retry_after_ms=1000)
            await asyncio.sleep(POLL_S)


def _runs(task: asyncio.Task[Slept] | asyncio.Task[Woken] | None) -> bool:
    return task is not None and not task.done()
