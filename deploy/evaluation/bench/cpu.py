"""`pando bench cpu`: the "CPU default" figures of one server, or of several for comparison.

Each round measures the servers in turn, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession
from deploy.evaluation.bench.report import output_console, print_failure, spread_text
from deploy.evaluation.bench.results import Provenance, ResultSheet, short_model, write_results
from deploy.evaluation.bench.serve_arguments import (
    DEFAULT_URL,
    add_result_arguments,
    add_target_arguments,
    json_object,
    positive_int,
)
from deploy.evaluation.bench.target import TargetError
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from deploy.evaluation.bench.records import RequestRecord

INPUT_TOKENS = 256
OUTPUT_TOKENS = 64
PREFIX_TOKENS = 1016
SUFFIX_TOKENS = 8

# metric, name, decimals
SINGLE_ROWS = (
    ("one_stream_ttft", "one stream: time to first token, ms", 0),
    ("one_stream_decode", "one stream: decode, tok/s", 1),
)
PREFIX_ROWS = (
    ("prefix_cold_ttft", "prefix, cold: time to first token, ms", 0),
    ("prefix_warm_ttft", "prefix, warm: time to first token, ms", 0),
)


@dataclass(slots=True)
class RoundSamples:
    """The figures of all rounds against one server, by metric."""

    label: str | None
    model: str
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, metric: str, value: float) -> None:
        """Add one round's figure."""
        self.values.setdefault(metric, []).append(value)

    def spread(self, metric: str) -> Spread | None:
        """Return the spread of a figure over all rounds; None if it was not measured."""
        return Spread.of(self.values[metric]) if metric in self.values else None


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench cpu`."""
    parser.add_argument(
        "--url",
        action="append",
        metavar="[LABEL=]URL",
        help=f"server; repeat it to measure several in turn ({DEFAULT_URL})",
    )
    parser.add_argument("--repeats", type=positive_int, default=3, help="rounds per figure (%(default)s)")
    parser.add_argument("--streams", type=positive_int, nargs="*", default=[8, 32], help="(8 32)")
    parser.add_argument("--single-requests", type=positive_int, default=3, help="one stream, per round (%(default)s)")
    parser.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="added to each request")
    add_target_arguments(parser)
    add_result_arguments(parser)


def run_cpu(arguments: argparse.Namespace) -> int:
    """Measure all servers; return the exit code."""
    console = output_console()
    try:
        servers = asyncio.run(_measure_all(arguments, Console(stderr=True)))
    except TargetError as error:
        print_failure("pando bench cpu", error)
        return 2
    console.print(_table(servers, arguments))
    if arguments.json is not None:
        provenance = Provenance.collect([*sys.argv[1:], "--seed", str(arguments.seed)])
        for samples in servers:
            write_results(arguments.json, _sheet(samples, arguments.tp, provenance).results)
    return 0


def parse_target(text: str) -> tuple[str | None, str]:
    """Split `label=url`; an equals sign after a scheme belongs to the URL."""
    label, equals, url = text.partition("=")
    if equals and "/" not in label and ":" not in label:
        return label, url
    return None, text


async def _measure_all(arguments: argparse.Namespace, progress: Console) -> list[RoundSamples]:
    targets = [parse_target(text) for text in arguments.url or [DEFAULT_URL]]
    benches: list[tuple[ServerUnderTest, RoundSamples]] = []
    try:
        for label, url in targets:
            bench = await ServerUnderTest.connect(_target_options(arguments, url))
            benches.append((bench, RoundSamples(label or arguments.label, short_model(bench.model))))
            await bench.warm_up(4, 2, INPUT_TOKENS, 16)
        for round_number in range(arguments.repeats):
            for bench, samples in benches:
                name = samples.label or samples.model
                progress.print(f"round {round_number + 1} of {arguments.repeats}: {name}", style="dim", highlight=False)
                await _round(bench, samples, round_number, arguments)
    finally:
        for bench, _ in benches:
            await bench.close()
    return [samples for _, samples in benches]


async def _round(bench: ServerUnderTest, samples: RoundSamples, number: int, arguments: argparse.Namespace) -> None:
    await _single_stream(bench, samples, number, arguments.single_requests)
    for streams in arguments.streams:
        name = f"streams/{streams}/{number}"
        sessions = random_sessions(streams, INPUT_TOKENS, OUTPUT_TOKENS, name=name)
        result = await bench.closed_loop(sessions, streams)
        output = sum(checked(record).output_tokens for record in result.records)
        samples.add(f"streams_{streams}_output", output / result.duration_s)
    await _prefix(bench, samples, number)


async def _single_stream(bench: ServerUnderTest, samples: RoundSamples, number: int, requests: int) -> None:
    sessions = random_sessions(requests, INPUT_TOKENS, OUTPUT_TOKENS, name=f"single/{number}")
    result = await bench.closed_loop(sessions, 1)
    for record in result.records:
        samples.add("one_stream_ttft", first_token_ms(record))
        if (rate := record.decode_tokens_per_s) is not None:
            samples.add("one_stream_decode", rate)


async def _prefix(bench: ServerUnderTest, samples: RoundSamples, number: int) -> None:
    """Send two prompts with one prefix and different ends, as one user."""
    for metric, end in (("prefix_cold_ttft", "first"), ("prefix_warm_ttft", "second")):
        segments = (
            Segment(f"prefix/{number}", PREFIX_TOKENS, role="system"),
            Segment(f"prefix/{number}/{end}", SUFFIX_TOKENS),
        )
        request = BenchRequest(segments, output_tokens=4, user=f"prefix-{number}")
        result = await bench.closed_loop([WorkloadSession((request,))], 1)
        samples.add(metric, first_token_ms(result.records[0]))


def checked(record: RequestRecord) -> RequestRecord:
    """Return `record` if its request succeeded, as figures that include failures would be meaningless.

    Raises:
        TargetError: the request failed.
    """
    if record.error is not None:
        raise TargetError(f"a request failed: {record.error}: {record.message}")
    return record


def first_token_ms(record: RequestRecord) -> float:
    """Return the time to the first token in milliseconds.

    Raises:
        TargetError: the request failed or had no output.
    """
    seconds = checked(record).time_to_first_s
    if seconds is None:
        raise TargetError("a request ended without output")
    return seconds * 1000


def _target_options(arguments: argparse.Namespace, url: str) -> TargetOptions:
    return TargetOptions(
        url=url,
        model=arguments.model,
        api_key=arguments.api_key,
        prompt_form=arguments.prompt_form,
        vocabulary=arguments.vocabulary,
        extra_body=arguments.extra_body,
        timeout_s=arguments.timeout,
        seed=arguments.seed,
    )


def _table(servers: Sequence[RoundSamples], arguments: argparse.Namespace) -> Table:
    title = f"{INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out; prefix {PREFIX_TOKENS} tokens; median (least-largest)"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for samples in servers:
        table.add_column(samples.label or samples.model, justify="right")
    streams = ((f"streams_{count}_output", f"{count} streams: output, tok/s", 1) for count in arguments.streams)
    for metric, name, decimals in (*SINGLE_ROWS, *streams, *PREFIX_ROWS):
        table.add_row(name, *(spread_text(samples.spread(metric), decimals) for samples in servers))
    return table


def _sheet(samples: RoundSamples, tp: int, provenance: Provenance) -> ResultSheet:
    sheet = ResultSheet("cpu-default", samples.model, tp, provenance, samples.label)
    units = {"ttft": "ms", "decode": "tok/s", "output": "tok/s"}
    for metric in samples.values:
        spread = samples.spread(metric)
        assert spread is not None
        sheet.add_spread(metric, spread, units[metric.rpartition("_")[2]])
    return sheet
