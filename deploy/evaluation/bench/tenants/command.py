"""`pando bench tenants`: the cost of isolating users; compares cache modes in one run with a real model."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.evaluation.bench.deployments import LaunchError, add_setting_arguments
from deploy.evaluation.bench.report import output_console, print_failure
from deploy.evaluation.bench.results import Provenance, write_results
from deploy.evaluation.bench.serve_arguments import add_result_arguments, positive_float, positive_int
from deploy.evaluation.bench.target import TargetError
from deploy.evaluation.bench.tenants.measuring import MODES, ModeServer, RoundOptions, play_rounds
from deploy.evaluation.bench.tenants.mixes import DEFAULT_SIZES, MIXES
from deploy.evaluation.bench.tenants.report import mode_table, ratio_table, sheets_of

if TYPE_CHECKING:
    import argparse

    from deploy.evaluation.bench.tenants.measuring import ModeRounds


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
    parser.add_argument("--epoch-seconds", type=positive_float, default=2.0, help="(%(default)s)")
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
        epoch_seconds=arguments.epoch_seconds,
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
