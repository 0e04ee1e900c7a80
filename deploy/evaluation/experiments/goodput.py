"""The highest rates at which layouts of groups were measured to keep limits of latency.

Run as `python -m deploy.evaluation.experiments.goodput [FILE]` over results of `gpu_table`, whose labels name the
layout, the tokens of the prompts and the rate. Limits are of percentiles over a load's requests or gaps, each by
itself, in milliseconds; a load with a failed request keeps none.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import read_results

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deploy.evaluation.bench.results import Result

RESULTS = Path("deploy/evaluation/results/group_roles.json")
# Gaps between tokens, with the limits of the simulation (`disaggregation`) and with wider ones; and the mean gap of a
# request, for nine of ten requests, as DistServe (Zhong et al. 2024, arXiv 2401.09670) counts.
LIMITS = ("ttft_p99=2000,itl_p99=50", "ttft_p99=2000,itl_p99=100", "ttft_p90=2000,tpot_p90=50")
_LABEL = re.compile(r"(?P<layout>.+), (?P<tokens>[\d,]+ in), (?P<rate>[\d.]+) requests/s")


@dataclass(frozen=True, slots=True)
class RatedLoad:
    """One load of a layout, with its figures by metric."""

    layout: str
    workload: str
    rate: float
    figures: Mapping[str, float] = field(default_factory=dict)

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether no request failed and all of `limits`, by metric, are kept.

        Raises:
            ValueError: the results lack such a metric.
        """
        if missing := limits.keys() - self.figures.keys():
            raise ValueError(f"{self.layout} has no {', '.join(sorted(missing))}; there are {', '.join(self.figures)}")
        return not self.figures.get("failed_any") and all(self.figures[name] <= most for name, most in limits.items())


def parse_limits(text: str) -> dict[str, float]:
    """Parse limits such as ttft_p99=2000,itl_p99=50.

    Raises:
        ValueError: it is written otherwise.
    """
    found = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name and equals):
            raise ValueError(f"limits are written as {LIMITS[0]}, not {text}")
        found[name] = float(value)
    return found


def rated_loads(results: Iterable[Result]) -> list[RatedLoad]:
    """Return the loads whose labels name layout, prompts and rate, by rate."""
    figures: dict[str, dict[str, float]] = {}
    for result in results:
        figures.setdefault(result.label or "", {})[result.metric] = result.value
    matches = ((_LABEL.fullmatch(label), found) for label, found in figures.items())
    loads = (RatedLoad(m["layout"], m["tokens"], float(m["rate"]), found) for m, found in matches if m is not None)
    return sorted(loads, key=lambda load: load.rate)


def table(loads: Sequence[RatedLoad], limits: Mapping[str, float], title: str) -> Table:
    """Return for each workload and layout the highest rate that keeps `limits`, and the next one that does not."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("prompts")
    shown.add_column("layout")
    for name in ("requests/s", "output tokens/s", "too many requests/s"):
        shown.add_column(name, justify="right")
    for workload, layout in sorted({(load.workload, load.layout) for load in loads}):
        own = [load for load in loads if (load.workload, load.layout) == (workload, layout)]
        kept = [load for load in own if load.keeps(limits)]
        best = kept[-1] if kept else None
        above = [load.rate for load in own if best is None or load.rate > best.rate]
        shown.add_row(
            workload,
            layout,
            f"{best.rate:g}" if best else "none",
            f"{best.figures['output_throughput']:,.0f}" if best else "",
            f"{above[0]:g}" if above else "not measured",
        )
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each set of limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, metavar="FILE", help="results (%(default)s)")
    parser.add_argument(
        "--limits", action="append", metavar="METRIC=MS,…", help=f"may be repeated ({'; '.join(LIMITS)})"
    )
    options = parser.parse_args(argv)
    try:
        loads = rated_loads(read_results(options.results))
        tables = [table(loads, parse_limits(limits), limits) for limits in options.limits or LIMITS]
    except ValueError as error:
        parser.error(str(error))
    if not loads:
        parser.error(f"{options.results} has no loads at a rate")
    for each in tables:
        output_console().print(each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
