"""A progress bar on standard error, for people only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from deploy.bench.records import RequestRecord


class RequestProgress:
    """Counts records; shows nothing where standard error is no terminal."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        """Expect `total` requests."""
        console = console or Console(stderr=True)
        # Redrawing competes with the load for the processor, so it stays rare.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=2,
            transient=True,
        )
        self._task = self._progress.add_task("requests", total=total)
        self._failed = 0

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._progress.stop()

    def on_record(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        self._failed += record.error is not None
        description = f"requests ({self._failed} failed)" if self._failed else "requests"
        self._progress.update(self._task, advance=1, description=description)
