"""Progress bars on standard error, only on terminals."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    from deploy.evaluation.bench.pipeline_client import PipelineRecord
    from deploy.evaluation.bench.records import RequestRecord

# Low, because redrawing competes with the load for the processor.
DRAWINGS_PER_S = 2


class RequestProgress:
    """Shows how many of `total` requests have ended; no output unless standard error is a terminal."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._progress = _bar(console)
        self._task = self._progress.add_task("requests", total=total)
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_record(self, record: RequestRecord) -> None:
        """Count a finished request."""
        self._failed += record.error is not None
        description = f"requests ({self._failed} failed)" if self._failed else "requests"
        self._progress.update(self._task, advance=1, description=description)


@contextlib.asynccontextmanager
async def following_tokens(
    records: Sequence[PipelineRecord], total: int, console: Console | None = None
) -> AsyncIterator[None]:
    """Show how many of `total` tokens the records have, if standard error is a terminal."""
    with _bar(console) as progress:
        task = progress.add_task("tokens", total=total)

        async def follow() -> None:
            while not progress.disable:
                progress.update(task, completed=sum(record.tokens for record in records))
                await asyncio.sleep(1 / DRAWINGS_PER_S)

        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()


def _bar(console: Console | None) -> Progress:
    console = console or Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=DRAWINGS_PER_S,
        transient=True,
    )
