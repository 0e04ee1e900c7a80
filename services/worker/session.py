"""One Execute stream: plans on their way to the engine's thread, results on their way back; and that thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from common.logs import get_logger
from common.types import StepId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.steps import StepPlan, StepResult

# Plans that are taken from the stream before their last result is written; gRPC holds back the peer beyond that.
MAX_OPEN_PLANS = 64
EngineCommand = Callable[[], None]
T = TypeVar("T")

HEARTBEAT_S = 0.25


class SessionEndedError(Exception):
    """The stream is over; whatever still computes for it may stop."""


class ExecuteSession:
    """Belongs to the event loop; the engine's thread reads `is_overtaken` and `is_ended`, and may set the latter."""

    def __init__(self, dispatch: Callable[[ExecuteSession, StepPlan], None]) -> None:
        """Start empty; `dispatch` hands a plan to the engine's thread."""
        # Once true, nothing more is computed for this session.
        self.is_ended = False
        # The newest plan that may not be abandoned, and the newest with prompts; the engine's thread reads both.
        self._last_urgent = StepId(0)
        self._last_prompts = StepId(0)
        self._dispatch = dispatch
        self._credits = asyncio.Semaphore(MAX_OPEN_PLANS)
        self._open_plans = 0
        self._has_all_plans = False
        self._outcomes: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()

    @property
    def open_plans(self) -> int:
        """Number of plans whose last result has not been consumed."""
        return self._open_plans

    async def submit(self, plan: StepPlan) -> None:
        """Queue a plan; waits while too many are open."""
        await self._credits.acquire()
        if not self.is_ended:
            if not plan.can_abandon:
                self._last_urgent = plan.step_id
            if plan.prefills:
                self._last_prompts = plan.step_id
            self._open_plans += 1
            self._dispatch(self, plan)

    def is_overtaken(self, plan: StepPlan) -> bool:
        """Whether a later plan waits for which passes of `plan` are abandoned or left out; any thread may ask."""
        newest = self._last_urgent if plan.can_abandon else self._last_prompts
        return newest > plan.step_id

    def finish_input(self) -> None:
        """Say that no more plans come; results end with those of the last plan."""
        self._has_all_plans = True
        self._end_if_done()

    def deliver(self, result: StepResult) -> None:
        """Take a result from the engine."""
        self._outcomes.put_nowait(result)

    def end(self, error: Exception | None = None) -> None:
        """Compute nothing more; `results` ends, with `error` if there is one, after what was delivered."""
        self.is_ended = True
        self._outcomes.put_nowait(error)

    async def results(self) -> AsyncIterator[StepResult]:
        """Yield results until the end; a plan counts as open until its last result is consumed.

        Raises:
            Exception: what `end` was given.
        """
        while True:
            outcome = await self._outcomes.get()
            if outcome is None:
                return
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            if outcome.last:
                self._open_plans -= 1
                self._credits.release()
                self._end_if_done()

    def _end_if_done(self) -> None:
        if self._has_all_plans and not self._open_plans:
            self._outcomes.put_nowait(None)


class EngineThread:
    """All work on the engine happens here: device contexts and thread counts belong to one thread."""

    def __init__(self, idle: EngineCommand | None = None, idle_s: float = HEARTBEAT_S) -> None:
        """Prepare; `start` starts. `idle` is called whenever there has been no command for `idle_s` seconds."""
        self._idle = idle
        self._idle_s = idle_s
        self._commands: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        self._last_beat = time.monotonic()
        self._last_command = time.monotonic()
        self._log = get_logger("engine")
        # A daemon: a collective that never returns cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last got on with something, or idled."""
        return time.monotonic() - self._last_beat

    def start(self) -> None:
        """Start running commands."""
        self._thread.start()

    @property
    def has_commands(self) -> bool:
        """Whether something waits to be run."""
        return not self._commands.empty()

    def submit(self, command: EngineCommand) -> None:
        """Queue a command; it handles its own errors."""
        self._commands.put(command)

    async def call(self, command: Callable[[], T]) -> T:
        """Run something after the queued commands, and return its result, or raise its error, on the event loop."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def succeed(outcome: T) -> None:
            if not done.cancelled():
                done.set_result(outcome)

        def fail(error: Exception) -> None:
            if not done.cancelled():
                done.set_exception(error)

        def run() -> None:
            try:
                outcome = command()
            except Exception as error:  # noqa: BLE001  (raised again in the caller that waits)
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(succeed, outcome)

        self.submit(run)
        return await done

    def beat(self) -> None:
        """Show a sign of life, from within a command."""
        self._last_beat = time.monotonic()

    def stop(self) -> None:
        """Let the thread end after the queued commands."""
        self._commands.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; return whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self.beat()
            try:
                command = self._commands.get(timeout=min(HEARTBEAT_S, self._idle_s))
            except queue.Empty:
                command = self._when_idle()
                if command is not None:
                    self._carry_out(command)
                continue
            if command is None:
                return
            self._carry_out(command)
            self._last_command = time.monotonic()

    def _when_idle(self) -> EngineCommand | None:
        """Return the idle command once the thread has been idle for its interval."""
        now = time.monotonic()
        if self._idle is None or now - self._last_command < self._idle_s:
            return None
        self._last_command = now
        return self._idle

    def _carry_out(self, command: EngineCommand) -> None:
        try:
            command()
        except Exception:  # noqa: BLE001  (the thread must outlive it)
            self._log.exception("engine.command_failed")
