"""Console output of benchmarks: progress bars on standard error, and tables of results."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from deploy.evaluation.bench.figures import QUANTILES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    from deploy.evaluation.bench.figures import LoadFigures, Percentiles, Spread
    from deploy.evaluation.bench.pipeline_client import PipelineRecord
    from deploy.evaluation.bench.records import LoadResult, RequestRecord
    from deploy.evaluation.bench.results import ResultSheet
    from deploy.evaluation.bench.workloads.ideal import IdealRates

NOT_REPORTED = "–"
# Width of tables in files and pipes.
WIDTH_WITHOUT_TERMINAL = 120
LATE_ENOUGH_TO_MENTION_S = 0.01
# Low, because redrawing competes with the load for the processor.
DRAWINGS_PER_S = 2


def output_console() -> Console:
    """Return the console for tables, on standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_WITHOUT_TERMINAL)


def load_table(figures: LoadFigures, title: str, ideal: IdealRates | None = None) -> Table:
    """Return the figures of one load as a table, with the hit rates of an unlimited cache in `ideal`."""
    table = Table(title=title, title_justify="left", caption=_caption(figures), caption_justify="left")
    for heading in ("", "mean", *(f"p{quantile}" for quantile in QUANTILES)):
        table.add_column(heading, justify="right" if heading else "left")
    _add_time_row(table, "time to first token, ms", figures.time_to_first)
    _add_time_row(table, "between chunks (ITL), ms", figures.between_chunks)
    _add_time_row(table, "per output token, ms", figures.per_output_token)
    _add_time_row(table, "end to end, ms", figures.end_to_end)
    if figures.late and figures.late.values[99] > LATE_ENOUGH_TO_MENTION_S:
        _add_time_row(table, "sent too late by, ms", figures.late)
    _add_row(table, "decode per stream, tokens/s", figures.decode_rate, 1)
    table.add_section()
    for name, value in (
        ("requests, failed", f"{figures.requests}, {figures.failed}"),
        ("duration, s", f"{figures.duration_s:.2f}"),
        ("requests/s", f"{figures.requests_per_s:.2f}"),
        ("output tokens/s", f"{figures.output_tokens_per_s:,.1f}"),
        ("input tokens/s", f"{figures.input_tokens_per_s:,.1f}"),
        ("tokens in, out", f"{figures.input_tokens:,}, {figures.output_tokens:,}"),
        ("cached share of input", _percent(figures.cached_share)),
    ):
        table.add_row(name, value)
    if ideal is not None:
        table.add_row("ideal hit rate within users", _percent(ideal.within))
        table.add_row("… and only across users", _percent(ideal.across))
    return table


def load_results(sheet: ResultSheet, figures: LoadFigures, ideal: IdealRates | None = None) -> None:
    """Add the figures of one load to `sheet`."""
    times = {
        "ttft": figures.time_to_first,
        "itl": figures.between_chunks,
        "tpot": figures.per_output_token,
        "e2e": figures.end_to_end,
    }
    for name, percentiles in times.items():
        for quantile in QUANTILES:
            value = percentiles.values[quantile] * 1000 if percentiles else None
            sheet.add(f"{name}_p{quantile}", value, "ms")
    sheet.add("output_throughput", figures.output_tokens_per_s, "tok/s")
    sheet.add("input_throughput", figures.input_tokens_per_s, "tok/s")
    sheet.add("request_throughput", figures.requests_per_s, "requests/s")
    sheet.add("decode_per_stream_p50", figures.decode_rate.values[50] if figures.decode_rate else None, "tok/s")
    sheet.add("cached_share", figures.cached_share, "share")
    if ideal is not None:
        sheet.add("ideal_hits_within_users", ideal.within, "share")
        sheet.add("ideal_hits_across_users", ideal.across, "share")
    sheet.add("requests", figures.requests, "requests")
    for kind, count in sorted({"any": figures.failed, **figures.errors}.items()):
        sheet.add(f"failed_{kind}", count, "requests")


def print_failure(program: str, error: Exception) -> None:
    """Write the reason why there are no figures to standard error."""
    line = Text.assemble((f"{program}: ", "red"), str(error))
    Console(stderr=True).print(line, soft_wrap=True)


def print_errors(console: Console, result: LoadResult) -> None:
    """Print each kind of failure with its count and one example."""
    examples: dict[str, list[str]] = {}
    for record in result.records:
        if record.error is not None:
            examples.setdefault(record.error, []).append(record.message)
    for kind, messages in sorted(examples.items()):
        line = f"{len(messages)} × {kind}: {messages[0][:300]}"
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)


def spread_text(spread: Spread | None, decimals: int = 0) -> str:
    """Return a median with its range."""
    if spread is None:
        return NOT_REPORTED
    shown = f"{spread.median:,.{decimals}f}"
    if spread.repeats > 1:
        shown += f" ({spread.low:,.{decimals}f}-{spread.high:,.{decimals}f})"
    return shown


def _caption(figures: LoadFigures) -> str | None:
    if figures.counted_by_chunks:
        return "The server sends no usage: output tokens are counted by chunks; input tokens are the intended ones."
    return None


def _percent(share: float | None) -> str:
    return "not reported by the server" if share is None else f"{share:.1%}"


def _add_time_row(table: Table, name: str, times: Percentiles | None) -> None:
    _add_row(table, name, times, 1000)


def _add_row(table: Table, name: str, values: Percentiles | None, factor: float) -> None:
    if values is None:
        table.add_row(name, *[NOT_REPORTED] * (1 + len(QUANTILES)))
        return
    shown = (values.mean, *(values.values[quantile] for quantile in QUANTILES))
    table.add_row(name, *(f"{value * factor:,.1f}" for value in shown))


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
