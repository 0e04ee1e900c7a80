"""`pando bench cache`: the prefix cache alone, with a million simulated requests and no model."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from deploy.evaluation.bench.arrivals import by_time
from deploy.evaluation.bench.cache.simulation import CacheSimulation, Machine
from deploy.evaluation.bench.cache.tally import OPERATIONS, Rules, Tally
from deploy.evaluation.bench.report import output_console, print_failure
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.serve_arguments import add_result_arguments, positive_float, positive_int
from deploy.evaluation.bench.workloads.ideal import IdealCache
from deploy.evaluation.bench.workloads.m1 import M1Shape, m1_stream
from deploy.evaluation.bench.workloads.trace import TraceOptions, trace_stream
from services.scheduler.cache.config import CacheConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from deploy.evaluation.bench.cache.tally import CacheFigures
    from deploy.evaluation.bench.records import WorkloadSession
    from services.scheduler.cache.factory import CacheName

MODES: tuple[CacheName, ...] = ("shared", "isolated", "isolated_pinned", "user_aware")
NONE = "–"


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench cache`."""
    machine, shape = Machine(), M1Shape()
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(all)")
    parser.add_argument("--requests", type=positive_int, default=1_000_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in the Mooncake format, instead of M1")
    parser.add_argument("--trace-speed", type=positive_float, default=1.0, help="2 is twice as fast (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=2, help="modes simulated at the same time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    m1 = parser.add_argument_group("M1")
    m1.add_argument("--users", type=positive_int, default=shape.users, help="(%(default)s)")
    m1.add_argument("--apps", type=positive_int, default=shape.apps, help="(%(default)s)")
    m1.add_argument("--rate", type=positive_float, default=10.0, metavar="R", help="requests/s (%(default)s)")
    m1.add_argument("--burstiness", type=positive_float, default=1.0, metavar="CV", help="1: Poisson (%(default)s)")
    m1.add_argument("--scale", type=positive_float, default=1.0, help="factor on lengths (%(default)s)")
    group = parser.add_argument_group("machine")
    group.add_argument("--device-pages", type=positive_int, default=machine.device_pages, help="(%(default)s)")
    group.add_argument("--page-size", type=positive_int, default=machine.page_size, help="(%(default)s)")
    group.add_argument("--epoch-seconds", type=positive_float, default=machine.epoch_seconds, help="(%(default)s)")
    group.add_argument("--promotion-subjects", type=positive_int, default=3, help="k (%(default)s)")
    group.add_argument(
        "--promotion-epochs", type=positive_int, default=CacheConfig().promotion_epochs, help="(%(default)s)"
    )
    add_result_arguments(parser)


def run_cache(arguments: argparse.Namespace) -> int:
    """Simulate all modes; return the exit code: 1 if a mode other than shared found tokens without evidence."""
    console, progress = output_console(), Console(stderr=True)
    try:
        # Not forked, as this process may have threads.
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            tasks = {mode: pool.submit(simulate, arguments, mode) for mode in arguments.modes}
            for task in as_completed(tasks.values()):
                mode = next(mode for mode, each in tasks.items() if each is task)
                progress.print(f"{mode} is done", style="dim", highlight=False)
            figures = {mode: task.result() for mode, task in tasks.items()}
    except (ValueError, OSError) as error:
        print_failure("pando bench cache", error)
        return 2
    console.print(cache_table(figures, workload_name(arguments)))
    console.print(cost_table(figures))
    if arguments.json is not None:
        provenance = Provenance.collect(sys.argv[1:])
        for mode, shown in figures.items():
            sheet = sheet_of(mode, shown, figures.get("shared"), f"cache-{workload_name(arguments)}", provenance)
            write_results(arguments.json, sheet.results)
    return int(any(shown.crossing_tokens for mode, shown in figures.items() if mode != "shared"))


def workload_name(arguments: argparse.Namespace) -> str:
    """Return the benchmark's name for results; runs with other numbers of requests or pages are other benchmarks."""
    name = "m1" if arguments.trace is None else f"trace-{arguments.trace.name.partition('.')[0]}"
    return f"{name}-{arguments.requests}-requests-{arguments.device_pages}-pages"


def simulate(arguments: argparse.Namespace, mode: CacheName) -> CacheFigures:
    """Simulate one mode and return its figures.

    Raises:
        ValueError: the shape or the trace is invalid.
        OSError: the trace cannot be read.
    """
    machine = Machine(
        device_pages=arguments.device_pages, page_size=arguments.page_size, epoch_seconds=arguments.epoch_seconds
    )
    config = CacheConfig(promotion_subjects=arguments.promotion_subjects, promotion_epochs=arguments.promotion_epochs)
    rules = Rules(by_evidence=mode in ("shared", "user_aware"), by_pins=mode == "isolated_pinned")
    tally = Tally(rules, IdealCache(keeps_answers=True, promotion_subjects=config.promotion_subjects))
    simulation = CacheSimulation(mode, machine, config, tally)
    arrivals = by_time(_sessions(arguments), machine.token_s)
    simulation.run(islice(arrivals, arguments.requests))
    return tally.figures(simulation)


def _sessions(arguments: argparse.Namespace) -> Iterator[WorkloadSession]:
    if arguments.trace is not None:
        return trace_stream(arguments.trace, TraceOptions(count=arguments.requests, speed=arguments.trace_speed))
    shape = M1Shape(users=arguments.users, apps=arguments.apps, scale=arguments.scale)
    return m1_stream(shape, arguments.rate, arguments.burstiness, arguments.seed)


def cache_table(figures: Mapping[str, CacheFigures], title: str) -> Table:
    """Return the figures of all modes as a table."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for mode in figures:
        table.add_column(mode, justify="right")
    rows = [_cells(shown, figures.get("shared")) for shown in figures.values()]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def cost_table(figures: Mapping[str, CacheFigures]) -> Table:
    """Return the costs of the operations in each mode as a table."""
    table = Table(title="µs per operation: median (mean)", title_justify="left")
    table.add_column("")
    for mode in figures:
        table.add_column(mode, justify="right")
    for name in OPERATIONS:
        costs = [shown.costs.get(name) for shown in figures.values()]
        table.add_row(name, *(f"{cost.median_us:.1f} ({cost.mean_us:.1f})" if cost else NONE for cost in costs))
    table.add_row("all of them, per request", *(f"{per_request_us(shown):.1f}" for shown in figures.values()))
    return table


def per_request_us(figures: CacheFigures) -> float:
    """Return the time of the cache per request in microseconds, epoch boundaries included."""
    return sum(cost.total_s for cost in figures.costs.values()) / max(figures.requests, 1) * 1e6


def sheet_of(
    mode: str, figures: CacheFigures, shared: CacheFigures | None, benchmark: str, provenance: Provenance
) -> ResultSheet:
    """Return the figures of one mode as results; the label is the mode."""
    sheet = ResultSheet(benchmark, "none", 1, provenance, mode)
    sheet.add("hit_rate", figures.hit_rate, "share")
    sheet.add("ideal_hits_within_users", figures.ideal_own / max(figures.input_tokens, 1), "share")
    across = figures.ideal_shared - figures.ideal_own
    sheet.add("ideal_hits_across_users", across / max(figures.input_tokens, 1), "share")
    sheet.add("crossing_tokens", figures.crossing_tokens, "tokens")
    sheet.add("fairness", figures.fairness, "Jain's index")
    sheet.add("mean_pages", figures.mean_pages, "pages")
    sheet.add("last_pages", figures.last_pages, "pages")
    sheet.add("promotions", figures.promotions, "nodes")
    sheet.add("false_demotions", figures.demotions, "nodes")
    sheet.add("false_quarantines", figures.quarantines, "nodes")
    if figures.promoted_after_s:
        sheet.add("promoted_after_p50", median(figures.promoted_after_s), "s")
    if shared is not None:
        sheet.add("hits_of_shared", figures.hit_tokens / max(shared.hit_tokens, 1), "ratio")
        sheet.add("pages_of_shared", figures.mean_pages / max(shared.mean_pages, 1), "ratio")
    for name, cost in figures.costs.items():
        sheet.add(f"{name}_p50", cost.median_us, "µs")
        sheet.add(f"{name}_mean", cost.mean_us, "µs")
    sheet.add("cost_per_request", per_request_us(figures), "µs")
    return sheet


def _cells(figures: CacheFigures, shared: CacheFigures | None) -> dict[str, str]:
    hits, pages = figures.hit_tokens, figures.mean_pages
    waits = figures.promoted_after_s
    ideal = figures.ideal_shared / max(figures.input_tokens, 1)
    return {
        "requests, of users": f"{figures.requests:,}, {figures.users:,}",
        "prompt tokens": f"{figures.input_tokens:,}",
        "hit tokens": f"{hits:,}",
        "hit rate": f"{figures.hit_rate:.1%}",
        "… of an unlimited cache": f"{ideal:.1%}",
        "hit tokens of shared's": f"{hits / shared.hit_tokens:.3f}" if shared and shared.hit_tokens else NONE,
        "hits across users without evidence": f"{figures.crossing_tokens:,}",
        "Jain's index of hit rates": f"{figures.fairness:.3f}",
        "pages in use, mean": f"{pages:,.0f}",
        "pages in use, of shared's": f"{pages / shared.mean_pages:.3f}" if shared and shared.mean_pages else NONE,
        "nodes at the end": f"{figures.nodes:,}",
        "system prompts public, of seen": f"{len(waits)} of {figures.prompts_seen}",
        "… after, median (longest)": f"{median(waits):.0f} ({max(waits):.0f}) s" if waits else NONE,
        "promotions": f"{figures.promotions:,}",
        "false quarantines, demotions": f"{figures.quarantines:,}, {figures.demotions:,}",
        "too large for memory": f"{figures.refused:,}",
    }
