"""One greedy user and eight modest ones under each policy: `python -m tests.benchmarks.fairness`.

The scheduler core runs as it is, with a user-aware cache; a worker that computes nothing takes the time that a GPU of
some size would: a constant per step, and something per token of prompt and per decoding row. Time is simulated, so the
figures are the same on every machine, and a run takes seconds.

The greedy user keeps 64 questions about a dozen long documents in the queue; each modest one holds a conversation,
whose next turn comes some seconds after the answer. Reported are times to first token; Jain's index of speed (a user's
speed is what its time to first token would be with nobody else there, over what it is: 1 means that all are slowed down
alike); and how much of the prompts the cache held.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from deploy.bench.report import output_console
from deploy.bench.results import Provenance, ResultSheet, write_results
from tests.benchmarks.shares_simulation import Simulation, Workload, figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.bench.results import Result
    from services.scheduler.policy.factory import PolicyName

RESULTS = Path(__file__).parent / "results" / "fairness.json"
UNITS = {
    "modest_ttft_p50": "ms",
    "modest_ttft_p95": "ms",
    "greedy_ttft_p50": "ms",
    "jain_index_of_speed": "",
    "hit_rate": "",
    "modest_turns": "",
    "output_tokens_per_s": "tok/s",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy as it is run."""

    label: str
    policy: PolicyName
    slack_tokens: float = 512.0


VARIANTS = (
    Variant("fcfs", "fcfs"),
    Variant("lpm", "lpm"),
    Variant("fair", "fair"),
    Variant("fair, no slack", "fair", 0.0),
    Variant("fair, slack 4096", "fair", 4096.0),
)


def measure(variant: Variant, workload: Workload) -> dict[str, float]:
    """Run one policy; return its figures by the names in `UNITS`."""
    simulation = Simulation(variant.policy, workload, variant.slack_tokens)
    simulation.run()
    return figures(simulation)


def main(argv: Sequence[str]) -> int:
    """Run all policies, print a table, and write the figures where wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=60.0, help="simulated seconds (%(default)s)")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write the figures to {RESULTS.name}")
    arguments = parser.parse_args(argv)
    workload = Workload(duration_s=arguments.duration)
    table = Table(title=f"1 greedy and {workload.modest_users} modest users", title_justify="left")
    table.add_column("")
    measured = {variant: measure(variant, workload) for variant in VARIANTS}
    results: list[Result] = []
    provenance = Provenance.collect(argv)
    provenance = Provenance("python -m tests.benchmarks.fairness --json", provenance.commit, provenance.date)
    for variant in VARIANTS:
        table.add_column(variant.label, justify="right")
        sheet = ResultSheet("fairness", "simulated", 1, provenance, variant.label)
        for name, unit in UNITS.items():
            sheet.add(name, measured[variant][name], unit)
        results += sheet.results
    for name, unit in UNITS.items():
        title = f"{name}, {unit}" if unit else name
        table.add_row(title, *(f"{measured[variant][name]:,.4g}" for variant in VARIANTS))
    output_console().print(table)
    if arguments.json:
        write_results(arguments.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
