"""The worth of routing among two scheduler groups on the M1 workload.

Run as `python -m deploy.evaluation.experiments.routing`.

Each policy undisturbed, then the best of them while one group is drained or killed under load and started again. The
engines make tokens up: prefill costs nothing, so what counts is the share of prompt tokens that was cached, and that no
request fails. Small caches, so that what is routed badly is also evicted sooner.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from tests.e2e.groups import Tier

BENCHMARK = "routing"
POLICIES = ("round_robin", "least_loaded", "prefix_aware")
# When one group ends, as a share of how long the run of the same policy took undisturbed, and for how long it is away.
ENDS_AT, AWAY_S = 0.4, 3.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A policy, and how one group ends meanwhile, if it does."""

    policy: str
    name: str
    end: signal.Signals | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run."""

    cached_share: float
    requests_per_s: float
    failed: int
    seconds: float
    shares: tuple[float, ...]
    """Of all requests, those that each group got; the one that went away last."""
    load: float
    """Processes that wanted a core, as a mean over the minute before the end."""


SCENARIOS = (
    *(Scenario(policy, policy) for policy in POLICIES),
    Scenario("prefix_aware", "prefix_aware, one drained", signal.SIGTERM),
    Scenario("prefix_aware", "prefix_aware, one killed", signal.SIGKILL),
)


def main() -> None:
    """Measure, print a table, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--scale", type=float, default=0.1, help="of all lengths of M1")
    parser.add_argument("--pages", type=int, default=2048, help="of each group, 16 tokens each")
    parser.add_argument("--cache", default="user_aware")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    arguments = parser.parse_args()
    undisturbed: dict[str, float] = {}
    measured: dict[Scenario, Figures] = {}
    for scenario in SCENARIOS:
        figures = measure(scenario, arguments, undisturbed.get(scenario.policy, 0.0))
        undisturbed.setdefault(scenario.policy, figures.seconds)
        measured[scenario] = figures
        sys.stderr.write(f"{scenario.name}: {figures}\n")
    output_console().print(table_of(measured))
    if arguments.json:
        keep(measured, arguments.json)


def measure(scenario: Scenario, arguments: argparse.Namespace, undisturbed_s: float) -> Figures:
    """Run the workload through two groups of their own."""
    settings = {
        "tokenizer.routing.policy": scenario.policy,
        "scheduler.device_pages": arguments.pages,
        "scheduler.cache.mode": arguments.cache,
    }
    with tempfile.TemporaryDirectory(prefix="pando-routing-") as folder:
        tier = Tier(Path(folder), settings, step_ms=2)
        output = Path(folder) / "result.json"
        try:
            tier.start()
            started = time.monotonic()
            process = start_bench(tier, arguments, output)
            if scenario.end is not None:
                time.sleep(ENDS_AT * undisturbed_s)
                tier.end_group(0, scenario.end)
                time.sleep(AWAY_S)
                tier.start_group(0)
            if process.wait():
                raise SystemExit(f"pando bench ended with {process.returncode}")
            seconds = time.monotonic() - started
            text = tier.metrics()
        finally:
            tier.stop()
        result: dict[str, Any] = {entry["metric"]: entry["value"] for entry in json.loads(output.read_text())}
    counts = re.findall(r'^pando_tokenizer_routed_requests_total\{replica="(.+)"\} (.+)$', text, re.MULTILINE)
    by_group = [float(count) for _, count in sorted(counts, reverse=True)]
    return Figures(
        cached_share=result["cached_share"],
        requests_per_s=result["request_throughput"],
        failed=int(result.get("failed_any", 0)),
        seconds=seconds,
        shares=tuple(count / sum(by_group) for count in by_group),
        load=os.getloadavg()[0],
    )


def start_bench(tier: Tier, arguments: argparse.Namespace, output: Path) -> subprocess.Popen[bytes]:
    """Begin the workload, the same for all scenarios."""
    options = {
        "url": f"http://127.0.0.1:{tier.port}",
        "workload": "m1",
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "scale": arguments.scale,
        "think-s": 0.2,
        "seed": 7,
        "json": output,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return subprocess.Popen([sys.executable, "-m", "deploy.cli", "bench", "serve", *flags], stdout=subprocess.DEVNULL)


def table_of(measured: dict[Scenario, Figures]) -> Table:
    """Return the figures as a table."""
    table = Table(box=None)
    for name in ("scenario", "cached", "requests/s", "failed", "by group", "load"):
        table.add_column(name, justify="left" if name == "scenario" else "right")
    for scenario, figures in measured.items():
        shares = " ".join(f"{share:.0%}" for share in figures.shares)
        cached, rate = f"{figures.cached_share:.1%}", f"{figures.requests_per_s:.1f}"
        table.add_row(scenario.name, cached, rate, str(figures.failed), shares, f"{figures.load:.1f}")
    return table


def keep(measured: dict[Scenario, Figures], path: Path) -> None:
    """Write the figures where results are kept."""
    command = shlex.join(["python", "-m", "deploy.evaluation.experiments.routing", *sys.argv[1:]])
    provenance = Provenance.collect([])
    provenance = Provenance(command, provenance.commit, provenance.date)
    results = []
    for scenario, figures in measured.items():
        sheet = ResultSheet(BENCHMARK, "fake", 1, provenance, scenario.name)
        sheet.add("cached_share", round(figures.cached_share, 4), "ratio")
        sheet.add("request_throughput", round(figures.requests_per_s, 2), "requests/s")
        sheet.add("failed", figures.failed, "requests")
        sheet.add("largest_share", round(max(figures.shares), 4), "ratio")
        sheet.add("load_average", round(figures.load, 2), "processes")
        results += sheet.results
    write_results(path, results)


if __name__ == "__main__":
    main()
