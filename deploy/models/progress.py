"""The progress of downloads as commands show it: bars on a terminal, otherwise lines or JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from common.models.progress import DownloadState, PeriodicReport

if TYPE_CHECKING:
    from rich.progress import TaskID

    from common.models.progress import DownloadReport


def download_report(*, as_json: bool = False, console: Console | None = None) -> DownloadReport:
    """Return a report that writes to standard error."""
    if as_json:
        return PeriodicReport(_write_json)
    console = console or Console(stderr=True, highlight=False)
    return BarReport(console) if console.is_terminal else PeriodicReport(_write_line)


class BarReport:
    """Shows one bar on a terminal for each model's download."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`."""
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def begin(self, model: str, files: int, total: int) -> None:
        """Show a bar."""
        self._progress = Progress(
            TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(), console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task(f"{model} ({files} files)", total=total)
        self._progress.start()

    def advance(self, count: int) -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, count)

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def size(count: float) -> str:
    """Return a number of bytes for people, in decimal units as disks are sold."""
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= divisor:
            return f"{count / divisor:.{1 if count < 100 * divisor else 0}f} {unit}"
    return f"{count:.0f} B"


def _write_line(state: DownloadState) -> None:
    share = 100 * state.done / state.total if state.total else 100
    sys.stderr.write(f"downloading {state.model}: {size(state.done)} of {size(state.total)} ({share:.0f} %)\n")


def _write_json(state: DownloadState) -> None:
    fields = {"model": state.model, "files": state.files, "done": state.done, "total": state.total}
    sys.stderr.write(json.dumps({"event": "model.download", "level": "info", "service": "pando", **fields}) + "\n")
    sys.stderr.flush()
