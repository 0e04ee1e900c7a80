"""A queueing model of one GPU: first tokens and gaps that its times of passes allow, by when passes are planned.

Run as `python -m deploy.evaluation.experiments.queueing_model [--rates 8 16] [--json FILE]`. Requests arrive as those
of `gpu_table online-ahead online-late` at the same rate, so figures are of the arrivals that are measured there. A pass
takes what `CostModel` says of an H200 and the 8B shape; everything else takes no time. Planning a pass when it begins
is the floor. Planned a pass ahead, who arrives during a pass is in the one after the next. Planned late, as with
`scheduler.late_planning`, plans are made a share of the pass before its end.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from deploy.evaluation.bench.arrivals import gamma_arrivals
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, current_commit, write_results
from deploy.evaluation.experiments.h200_costs import CostModel
from services.scheduler.plan_pacing import LEAST_LEAD_S, LONG_PASS_S

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARK, MODEL = "queueing-model", "llama-3.1-8b"
# Of the loads that `gpu_table` measures, whose seeds are their rates.
PROMPT, OUTPUT, SECONDS = 1784, 256, 60.0
STEP_TOKENS = 3584
# Plans are made as early as they would be if passes ended this share of their time before they were expected to.
EARLY_SHARE = 0.05


class PlannedWhen(StrEnum):
    """When a pass is planned."""

    AHEAD = "a pass ahead"
    LATE = "late"
    AT_START = "when it begins (floor)"

    def lead_s(self, pass_s: float) -> float:
        """Return the time from planning the next pass to the end of one that takes `pass_s`, in seconds."""
        if self is PlannedWhen.AT_START:
            return 0.0
        if self is PlannedWhen.AHEAD or pass_s < LONG_PASS_S:
            return pass_s
        return min(pass_s, LEAST_LEAD_S + EARLY_SHARE * pass_s)


@dataclass(slots=True)
class _Prompt:
    arrived: float
    missing: int


@dataclass(slots=True)
class ModelledGpu:
    """One GPU in simulated time, whose prompts and answers all have the same length."""

    costs: CostModel
    planned: PlannedWhen
    step_tokens: int = STEP_TOKENS
    prompt: int = PROMPT
    output: int = OUTPUT
    # Times of requests to the first token, and between tokens, in seconds.
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    _waiting: deque[_Prompt] = field(default_factory=deque)
    # When each decoding row got its latest token, and how many it has.
    _rows: list[tuple[float, int]] = field(default_factory=list)

    def run(self, arrivals: Sequence[float]) -> None:
        """Serve requests that arrive at these times, in seconds and in order."""
        coming = deque(arrivals)
        now, planned_at = 0.0, 0.0
        while coming or self._waiting or self._rows:
            if not self._waiting and not self._rows:
                now = planned_at = max(now, coming[0])
            while coming and coming[0] <= planned_at:
                self._waiting.append(_Prompt(coming.popleft(), self.prompt))
            tokens, completed = self._plan()
            if not tokens and not self._rows:
                # Whoever has arrived since the plan was due.
                planned_at = now
                continue
            pass_s = self._pass_s(tokens)
            planned_at = now + pass_s - self.planned.lead_s(pass_s)
            now += pass_s
            self._end_pass(now, completed)

    def _plan(self) -> tuple[int, list[_Prompt]]:
        """Return the prompt tokens of a pass, and the prompts that it completes."""
        budget = self.step_tokens - len(self._rows)
        tokens, completed = 0, []
        while self._waiting and budget > tokens:
            first = self._waiting[0]
            chunk = min(budget - tokens, first.missing)
            first.missing -= chunk
            tokens += chunk
            if not first.missing:
                completed.append(self._waiting.popleft())
        return tokens, completed

    def _pass_s(self, tokens: int) -> float:
        kv_tokens = sum(self.prompt + count for _, count in self._rows)
        return self.costs.pass_s(tokens, 0.0, len(self._rows), kv_tokens)

    def _end_pass(self, now: float, completed: list[_Prompt]) -> None:
        self.itl += [now - latest for latest, _ in self._rows]
        self._rows = [(now, count + 1) for _, count in self._rows if count + 1 < self.output]
        self.ttft += [now - prompt.arrived for prompt in completed]
        self._rows += [(now, 1) for _ in completed]


@dataclass(frozen=True, slots=True)
class ModelFigure:
    """One value: `label` names the rate and when passes are planned."""

    label: str
    metric: str
    value: float


def figures(rate: float, planned: PlannedWhen, seeds: Sequence[int], step_tokens: int) -> list[ModelFigure]:
    """Return percentiles in ms for a rate: medians over seeds of arrivals. Without seeds, the rate is the only one."""
    gpus = []
    for seed in seeds or (round(rate),):
        gpus.append(ModelledGpu(CostModel(), planned, step_tokens))
        gpus[-1].run(gamma_arrivals(round(rate * SECONDS), rate, seed=seed))
    label = f"{rate:g} requests/s, planned {planned}"
    return [
        ModelFigure(label, f"{name}_p{percent}", 1e3 * median(float(np.percentile(each, percent)) for each in times))
        for name, times in (("ttft", [gpu.ttft for gpu in gpus]), ("itl", [gpu.itl for gpu in gpus]))
        for percent in (50, 99)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print; with `--json` also keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[8.0, 12.0, 14.0, 16.0], help="(8 12 14 16)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="of arrivals: medians of several (the rate)")
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS, help="most tokens of a pass (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found = [
        figure
        for rate in options.rates
        for planned in PlannedWhen
        for figure in figures(rate, planned, options.seeds, options.step_tokens)
    ]
    labels = list(dict.fromkeys(figure.label for figure in found))
    metrics = list(dict.fromkeys(figure.metric for figure in found))
    table = Table("ms", *metrics)
    values = {(figure.label, figure.metric): figure.value for figure in found}
    for label in labels:
        table.add_row(label, *(f"{values[label, metric]:.1f}" for metric in metrics))
    output_console().print(table)
    if options.json:
        command = shlex.join(["python", "-m", "deploy.evaluation.experiments.queueing_model", *sys.argv[1:]])
        origin = Provenance(command, current_commit(), datetime.datetime.now(datetime.UTC).date().isoformat())
        for label in labels:
            sheet = ResultSheet(BENCHMARK, MODEL, 1, origin, label)
            for metric in metrics:
                sheet.add(metric, values[label, metric], "ms")
            write_results(options.json, sheet.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
