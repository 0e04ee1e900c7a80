"""A thread that runs commands one after another and shows that it is alive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from common.logs import get_logger

EngineCommand = Callable[[], None]

HEARTBEAT_S = 0.25


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
