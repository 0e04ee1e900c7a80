"""`pando bench tenants`: the cost of isolating users; compares cache modes in one run with a real model.

Ratios between modes are computed within rounds.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from common.settings.scheduler import CacheSettings
from deploy.evaluation.bench.deployments import LaunchError, add_setting_arguments
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console, print_failure, spread_text
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.serve_arguments import add_result_arguments, positive_float, positive_int
from deploy.evaluation.bench.target import TargetError
from deploy.evaluation.bench.tenants.measuring import DEFAULT_SIZES, MIXES, MODES, ModeServer, RoundOptions, play_rounds

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from deploy.evaluation.bench.tenants.measuring import ModeRounds, PhaseFigures

SUBJECT = "user_aware"
# metric, name, unit, decimals, function that reads it
FIGURES: tuple[tuple[str, str, str, int, Callable[[PhaseFigures], float]], ...] = (
    ("request_throughput", "requests/s", "requests/s", 2, lambda phase: phase.load.requests_per_s),
    ("output_throughput", "output tokens/s", "tok/s", 1, lambda phase: phase.load.output_tokens_per_s),
    ("ttft_p50", "time to first token p50, ms", "ms", 0, lambda phase: _first_ms(phase, 50)),
    ("ttft_p99", "time to first token p99, ms", "ms", 0, lambda phase: _first_ms(phase, 99)),
    ("cached_share", "cached share of input", "share", 3, lambda phase: phase.load.cached_share or 0.0),
)
# metric, mode with which user_aware is compared, target of the specification
RATIOS = (
    ("request_throughput", "isolated", "≥ 2.66"),
    ("request_throughput", "shared", "≥ 0.97"),
    ("ttft_p50", "isolated", "≤ 0.59"),
    ("ttft_p50", "shared", ""),
    ("request_throughput", "isolated_pinned", ""),
)


def add_tenants_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench tenants`."""
    parser.add_argument("--mix", choices=tuple(MIXES), default="s1", help="workload, scaled down (%(default)s)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(all)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="(%(default)s)")
    parser.add_argument("--users", type=positive_int, help="per phase; default: 32")
    parser.add_argument("--apps", type=positive_int, help="default: 2")
    parser.add_argument("--scale", type=positive_float, help="factor on lengths; default: 1/8")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=positive_int, default=8, help="sessions at a time (%(default)s)")
    load.add_argument("--rate", type=positive_float, help="instead: sessions per second, Poisson")
    sharing = CacheSettings().sharing_seconds
    parser.add_argument("--sharing-seconds", type=positive_float, default=sharing, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    add_setting_arguments(parser)
    add_result_arguments(parser)


def run_tenants(arguments: argparse.Namespace) -> int:
    """Measure all modes; return the exit code."""
    console, progress = output_console(), Console(stderr=True)
    options = options_of(arguments)
    try:
        with ExitStack() as stack:
            servers = [ModeServer(mode, arguments.config, arguments.overrides, options) for mode in arguments.modes]
            for server in servers:
                progress.print(f"starting {server.mode}", style="dim", highlight=False)
                stack.enter_context(server.deployment)
            model = servers[0].deployment.model
            rounds = asyncio.run(
                play_rounds(servers, options, lambda line: progress.print(line, style="dim", highlight=False))
            )
    except (LaunchError, TargetError) as error:
        print_failure("pando bench tenants", error)
        return 2
    _report(console, arguments, model, rounds)
    return 0


def options_of(arguments: argparse.Namespace) -> RoundOptions:
    """Return the options of the rounds."""
    size = DEFAULT_SIZES[arguments.mix]
    chosen = {name: getattr(arguments, name) for name in ("users", "apps", "scale") if getattr(arguments, name)}
    return RoundOptions(
        mix=arguments.mix,
        size=replace(size, **chosen),
        rounds=arguments.rounds,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        sharing_seconds=arguments.sharing_seconds,
        seed=arguments.seed,
    )


def _report(console: Console, arguments: argparse.Namespace, model: str, rounds: list[ModeRounds]) -> None:
    benchmark = f"tenants-{arguments.mix}" if arguments.rate is None else f"tenants-{arguments.mix}-open"
    for phase in rounds[0].phases:
        console.print(mode_table(rounds, phase, f"{benchmark}, {phase}, {model}; median (least-largest)"))
    console.print(ratio_table(rounds))
    if arguments.json is not None:
        provenance = Provenance.collect(sys.argv[1:])
        for sheet in sheets_of(rounds, benchmark, model, provenance):
            write_results(arguments.json, sheet.results)


def mode_table(rounds: Sequence[ModeRounds], phase: str, title: str) -> Table:
    """Return the figures of all modes in one phase as a table."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for mode in rounds:
        table.add_column(mode.mode, justify="right")
    for metric, name, _, decimals, _ in FIGURES:
        spreads = (Spread.of(values(mode, phase, metric)) for mode in rounds)
        table.add_row(name, *(spread_text(spread, decimals) for spread in spreads))
    return table


def ratio_table(rounds: Sequence[ModeRounds]) -> Table:
    """Return the figures of user_aware relative to other modes, before and after promotion, as a table."""
    phases = list(rounds[0].phases)
    table = Table(title=f"{SUBJECT} as a multiple of other modes", title_justify="left")
    for heading in ("", *phases, "target, warm"):
        table.add_column(heading, justify="right" if heading else "left")
    for metric, other, target in RATIOS:
        found = [ratio(rounds, phase, metric, other) for phase in phases]
        if all(spread is not None for spread in found):
            table.add_row(f"{metric} / {other}", *(spread_text(spread, 2) for spread in found), target)
    return table


def ratio(rounds: Sequence[ModeRounds], phase: str, metric: str, other: str) -> Spread | None:
    """Return a figure of user_aware divided by that of another mode, by round; None if a mode was not measured."""
    by_mode = {mode.mode: mode for mode in rounds}
    if SUBJECT not in by_mode or other not in by_mode:
        return None
    pairs = zip(values(by_mode[SUBJECT], phase, metric), values(by_mode[other], phase, metric), strict=True)
    return Spread.of([subject / base for subject, base in pairs])


def values(mode: ModeRounds, phase: str, metric: str) -> list[float]:
    """Return one figure of a phase for every round."""
    read = next(read for name, _, _, _, read in FIGURES if name == metric)
    return [read(figures) for figures in mode.phases[phase]]


def sheets_of(rounds: Sequence[ModeRounds], benchmark: str, model: str, provenance: Provenance) -> list[ResultSheet]:
    """Return all figures as results; labels are mode and phase, or the two modes of a ratio and the phase."""
    sheets = []
    for phase in rounds[0].phases:
        for mode in rounds:
            sheet = ResultSheet(benchmark, model, 1, provenance, f"{mode.mode}, {phase}")
            for metric, _, unit, _, _ in FIGURES:
                sheet.add_spread(metric, Spread.of(values(mode, phase, metric)), unit)
            for number, points in enumerate(zip(*(figures.curve for figures in mode.phases[phase]), strict=False)):
                sheet.add_spread(f"curve_{number:03d}", Spread.of(points), "requests/s")
            sheets.append(sheet)
        for metric, other, _ in RATIOS:
            if (spread := ratio(rounds, phase, metric, other)) is not None:
                sheet = ResultSheet(benchmark, model, 1, provenance, f"{SUBJECT} / {other}, {phase}")
                sheet.add_spread(metric, spread, "ratio")
                sheets.append(sheet)
    return sheets


def _first_ms(phase: PhaseFigures, quantile: int) -> float:
    times = phase.load.time_to_first
    return times.values[quantile] * 1000 if times else 0.0
