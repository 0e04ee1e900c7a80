"""The table of `docs/benchmarks/cache.md` about recurrent layers shows what `results/hybrid_chats.json` has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.evaluation.bench.results import read_results
from deploy.evaluation.experiments.hybrid_chats import DEFAULT_MODELS, KINDS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "benchmarks" / "cache.md").read_text().partition("\n## With recurrent layers\n")[2]
RESULTS = {
    (result.label, result.model, result.metric): result.value
    for result in read_results(ROOT / "deploy" / "evaluation" / "results" / "hybrid_chats.json")
}
# As the columns are ordered.
COLUMNS = [(kind, path.name) for kind in KINDS for path in DEFAULT_MODELS]
METRICS = {
    "turn 1,": "turn 1: found",
    **{f"turn {turn} ": f"turn {turn}: found" for turn in (2, 5, 10)},
    "turns 2 to 10": "turns 2 to 10: found",
    "… with regular": "turns 2 to 10: found with these alone",
}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith(("| turn", "| …"))
]


def test_each_row_is_known() -> None:
    assert len(ROWS) == len(METRICS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_figures_are_those_of_the_file(row: list[str]) -> None:
    title, *cells = row
    [metric] = [metric for start, metric in METRICS.items() if f"{title} ".startswith(start)]
    shown = dict(zip(COLUMNS, cells, strict=True))
    assert any(shown.values())
    for (kind, model), cell in shown.items():
        value = RESULTS.get((kind, model, metric))
        assert cell == ("" if value is None else f"{value:g} %")


def test_the_distance_of_regular_snapshots_is_that_of_the_file() -> None:
    [shown] = re.findall(r"here ([\d,]+) tokens apart", PAGE)
    distances = {value for (_, _, metric), value in RESULTS.items() if metric == "distance of regular snapshots"}
    assert distances == {float(shown.replace(",", ""))}
