"""Savings of jumping forward where a schema has many fixed keys: the bundled model on the CPU, without gRPC.

Run as `python -m deploy.evaluation.experiments.jumps --json deploy/evaluation/results/jumps.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.types import SamplingParams
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import schema_grammar
from tests.services.worker.engine.grammars.writing import ROWS, load, outputs

REPEATS = 3
JUMP_TOKENS = 16
FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "forecast_for_city": {"enum": ["Paris", "Rome"]},
        "temperature_celsius": {"type": "integer", "minimum": 0, "maximum": 40},
        "chance_of_precipitation": {"enum": ["low", "high"]},
        "wind_speed_kilometers": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_public_holiday": {"type": "boolean"},
    },
    "additionalProperties": False,
}
FORECAST["required"] = list(FORECAST["properties"])


def main() -> None:
    """Measure and print; write results where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure()
    for metric, (spread, unit) in figures.items():
        sys.stdout.write(f"{metric:60} {spread.median:10.1f} {unit}  ({spread.low:.1f} to {spread.high:.1f})\n")
    if arguments.json is not None:
        command = f"python -m deploy.evaluation.experiments.jumps --json {arguments.json}"
        sheet = ResultSheet("jumps", "smollm2-135m-instruct", 1, replace(Provenance.collect(()), command=command))
        for metric, (spread, unit) in figures.items():
            sheet.add_spread(metric, spread, unit)
        write_results(arguments.json, sheet.results)


def measure() -> dict[str, tuple[Spread, str]]:
    """Return passes and tokens per second with jumps and without, taken in turns."""
    engine = load()
    figures: dict[str, tuple[Spread, str]] = {}
    sampling = SamplingParams(temperature=0.0)
    for title, schemas in (
        ("fixed keys, 1 row", [FORECAST]),
        (f"fixed keys, {ROWS} rows", [FORECAST] * ROWS),
        (f"corpus, {ROWS} rows", list(CORPUS.values())[:ROWS]),
    ):
        grammars = [schema_grammar(schema) for schema in schemas]
        passes: dict[int, list[float]] = {0: [], JUMP_TOKENS: []}
        rates: dict[int, list[float]] = {0: [], JUMP_TOKENS: []}
        outputs(engine, grammars, sampling, 0)
        for _ in range(REPEATS):
            for jump, taken in passes.items():
                started = time.perf_counter()
                written, count = outputs(engine, grammars, sampling, jump)
                rates[jump].append(sum(map(len, written)) / (time.perf_counter() - started))
                taken.append(float(count))
        for jump, taken in passes.items():
            way = "jumping" if jump else "token by token"
            figures[f"{title}, {way}: passes"] = Spread.of(taken), "passes"
            figures[f"{title}, {way}: throughput"] = Spread.of(rates[jump]), "tokens/s"
    engine.close()
    return figures


if __name__ == "__main__":
    main()
