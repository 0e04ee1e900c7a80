"""Wakes the workers of one of the models that share a device when it is the model's turn, and puts them to sleep."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from common.errors import ConfigurationError, PandoError
from common.logs import get_logger
from common.steps import SleepLevel, SleepPart
from services.scheduler import metrics
from services.scheduler.group import GroupState
from services.scheduler.sleep_desk import SleepMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from common.settings.scheduler import DeviceTurnSettings
    from services.scheduler.group import WorkerGroup
    from services.scheduler.loop import SchedulerLoop
    from services.scheduler.sleep_desk import SleepDesk
    from services.scheduler.turn_queue import TurnQueue

POLL_S = 0.05
# A model whose workers cannot be reached for so long loses its turn.
REACH_S = 2.0
# Pause after the workers could not be woken or put to sleep; it doubles up to the other one while they cannot be woken.
RETRY_S = 1.0
MAX_RETRY_S = 30.0


class TurnDesk:
    """Takes turns for one model: when it starts, to load the model, and then whenever requests wait for it."""

    def __init__(
        self,
        settings: DeviceTurnSettings,
        queue: TurnQueue,
        loop: SchedulerLoop,
        group: WorkerGroup,
        sleep: SleepDesk,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `sleep` for `group`, which starts asleep, whenever `queue` gives it the turn and `loop` has requests."""
        self._settings = settings
        self._queue = queue
        self._loop = loop
        self._group = group
        self._sleep = sleep
        self._clock = clock
        self._level = SleepLevel(settings.level)
        self._pause_s = RETRY_S
        self._log = get_logger("turns")

    async def run(self) -> NoReturn:
        """Take turns until cancelled.

        Raises:
            ConfigurationError: the directory cannot be used.
        """
        try:
            while True:
                if await self._take() and not await self._serve():
                    # The others go on meanwhile.
                    self._log.warning("turn.pauses", seconds=self._pause_s)
                    await asyncio.sleep(self._pause_s)
                    self._pause_s = min(2 * self._pause_s, MAX_RETRY_S)
                await asyncio.sleep(POLL_S)
        except OSError as error:
            raise ConfigurationError(f"scheduler.device_turns.directory: {error}") from error
        finally:
            self._queue.leave()
            self._queue.release()

    @property
    def _is_wanted(self) -> bool:
        """Whether there are requests, or the model was never loaded."""
        core = self._loop.core
        return core is None or any(True for _ in core.open_sequences)

    async def _take(self) -> bool:
        """Wait for the turn while it is wanted and the workers are there; return whether it is this model's."""
        began_at = self._clock()
        while self._is_wanted and self._group.is_reachable:
            self._queue.ask()
            if self._queue.try_take():
                waited_s = self._clock() - began_at
                metrics.TURNS_TOTAL.inc()
                metrics.TURN_WAIT_SECONDS.observe(waited_s)
                self._log.info("turn.began", waited_s=round(waited_s, 3))
                return True
            await asyncio.sleep(POLL_S)
        self._queue.leave()
        return False

    async def _serve(self) -> bool:
        """Wake the workers, serve as long as the turn lasts, and put them to sleep; return whether they were woken."""
        try:
            if not await self._wake():
                return False
            self._pause_s = RETRY_S
            began_at = self._clock()
            await self._until_over(began_at)
            self._log.info("turn.ended", seconds=round(self._clock() - began_at, 3))
            return True
        finally:
            self._queue.release()

    async def _wake(self) -> bool:
        """Wake the workers; return whether that has succeeded. While others wait, it has one try and limited time."""
        began_at, failed_loads = self._clock(), self._group.failed_loads
        waking = asyncio.create_task(self._sleep.wake_up(tuple(SleepPart)))
        while not waking.done():
            limit_s = self._settings.wake_timeout_s if self._group.is_reachable else REACH_S
            has_failed = self._group.failed_loads > failed_loads
            if (has_failed or self._clock() - began_at > limit_s) and self._queue.others_wait:
                reason = "its workers could not load it" if has_failed else f"it was not woken within {limit_s:g} s"
                self._group.step_back(self._level, reason)
            await asyncio.wait([waking], timeout=POLL_S)
        metrics.TURN_SWITCH_SECONDS.observe(self._clock() - began_at)
        try:
            waking.result()
        except PandoError as error:
            self._log.warning("turn.not_woken", reason=str(error))
            return False
        return True

    async def _until_over(self, began_at: float) -> None:
        """Serve until others wait and the turn may end; then put the workers to sleep."""
        idle_since: float | None = None
        while True:
            await asyncio.sleep(POLL_S)
            now = self._clock()
            idle_since = None if self._is_wanted else idle_since or now
            if idle_since is None:
                may_end = now - began_at >= self._settings.min_turn_s
            else:
                may_end = now - idle_since >= self._settings.idle_s
            if may_end and self._queue.others_wait and await self._fall_asleep():
                return

    async def _fall_asleep(self) -> bool:
        """Put the workers to sleep; return whether they sleep, or are lost, so that nothing holds the device."""
        if self._group.state is not GroupState.READY:
            self._log.warning("turn.lost", state=self._group.state.value)
            self._group.step_back(self._level, "its workers were lost in its turn")
            return True
        core = self._loop.core
        keeps = core is not None and core.memory.loads is not None
        began_at = self._clock()
        try:
            await self._sleep.sleep(self._level, SleepMode.REQUEUE, keep_cache=keeps)
        except PandoError as error:
            self._log.warning("turn.goes_on", reason=str(error))
            await asyncio.sleep(RETRY_S)
            return False
        metrics.TURN_SWITCH_SECONDS.observe(self._clock() - began_at)
        return True
