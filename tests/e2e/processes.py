"""Services started one by one, where the supervisor's layout does not do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from deploy.supervisor.process import child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STOP_S = 120.0


class Processes:
    """Processes by name, each with a log file; all end with this."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, module: str, settings: Mapping[str, object], prefix: Sequence[str] = (), **variables: str
    ) -> None:
        """Run `python -m module`, as the supervisor does, with settings as flags: {"scheduler.max_rows": 8}.

        `prefix` goes before the command; `variables` are added to the environment.
        """
        flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "deploy.supervisor.child", str(os.getpid()), module, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ) | variables,
            )

    def end(self, name: str, number: signal.Signals = signal.SIGTERM, timeout_s: float = STOP_S) -> None:
        """Send a signal and wait until the process has ended."""
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait(timeout_s)

    def kill(self, name: str) -> None:
        """Kill a process, which stays among these until it is started again."""
        self._processes[name].kill()

    def has_ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            process.wait(STOP_S)

    def logs(self) -> str:
        """Return the last lines of everybody."""
        paths = sorted(self._directory.glob("*.log"))
        return "\n".join(f"{path.stem}: {path.read_text()[-2000:]}" for path in paths)

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"
