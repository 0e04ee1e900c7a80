"""`pando bench`: load generators and benchmarks. Each prints a table and can write its results as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.bench.cache.command import add_cache_arguments, run_cache
from deploy.evaluation.bench.control_plane.command import add_control_plane_arguments, run_control_plane
from deploy.evaluation.bench.cpu import add_cpu_arguments, run_cpu
from deploy.evaluation.bench.offline import add_offline_arguments, run_offline
from deploy.evaluation.bench.plots import add_plots_arguments, run_plots
from deploy.evaluation.bench.serve import run_serve
from deploy.evaluation.bench.serve_arguments import add_serve_arguments
from deploy.evaluation.bench.tenants.command import add_tenants_arguments, run_tenants
from deploy.evaluation.bench.trace_writing import add_trace_arguments, run_trace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

INTERRUPTED = 130  # the exit status of a process ended by SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `pando bench`."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="BENCHMARK")
    for name, (text, add, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add(command)
        command.set_defaults(bench_run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen benchmark; return the exit code."""
    chosen: Callable[[argparse.Namespace], int] = arguments.bench_run
    try:
        return chosen(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "serve": (
        "Load any OpenAI-compatible server, closed loop or open loop, and report latencies and throughput.",
        add_serve_arguments,
        run_serve,
    ),
    "cpu": (
        "Measure the CPU default (SmolLM2-135M) on one server, or on several in turn.",
        add_cpu_arguments,
        run_cpu,
    ),
    "offline": (
        "Throughput of scheduler, workers and detokenizer, with token ids over gRPC: workload W1, or one stream.",
        add_offline_arguments,
        run_offline,
    ),
    "tenants": (
        "The cost of isolating users: compare all cache modes, with a real model.",
        add_tenants_arguments,
        run_tenants,
    ),
    "cache": (
        "The prefix cache alone, in every mode, on a simulated server: hits, pages, fairness, cost.",
        add_cache_arguments,
        run_cache,
    ),
    "trace": (
        "Write workload M1 as a hash-id trace in the Mooncake format, and print its ideal hit rates.",
        add_trace_arguments,
        run_trace,
    ),
    "plots": (
        "Draw the results in a folder.",
        add_plots_arguments,
        run_plots,
    ),
    "control-plane": (
        "The cost of everything except the model, with all services and a worker that computes nothing.",
        add_control_plane_arguments,
        run_control_plane,
    ),
}
