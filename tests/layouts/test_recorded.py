"""The recorded comparison of all layouts with one rank, and what the documents say of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.evaluation.bench.results import read_results
from tests.layouts.arrangements import ARRANGEMENTS

ROOT = Path(__file__).resolve().parents[2]
RECORDED = read_results(ROOT / "deploy" / "evaluation" / "results" / "layouts.json")
COUNTS = ("requests", "kills", "differences", "ties")
TEXT = (ROOT / "docs" / "benchmarks" / "scaling.md").read_text()
SUMMARY = (ROOT / "docs" / "scaling.md").read_text()


def recorded(metric: str, layout: str) -> int:
    (value,) = (entry.value for entry in RECORDED if (entry.metric, entry.label) == (metric, layout))
    return int(value)


def total(metric: str) -> int:
    return sum(recorded(metric, layout) for layout in ARRANGEMENTS)


def test_every_layout_is_recorded_and_none_differs() -> None:
    assert {entry.label for entry in RECORDED} == set(ARRANGEMENTS)
    assert total("requests") >= 10_000
    assert total("differences") == 0
    assert all(recorded("kills", layout) > 0 for layout in ARRANGEMENTS)


def test_the_document_has_the_totals() -> None:
    (stated,) = re.findall(
        r"Of ([\d,]+) requests \(([\d,]+) greedy, the others with seeds\) to (\d+) layouts, during ([\d,]+) kills, "
        r"none was answered otherwise; in (\d+) of them",
        " ".join(TEXT.split()),
    )
    numbers = [total("requests"), total("greedy"), len(ARRANGEMENTS), total("kills"), total("ties")]
    assert [int(number.replace(",", "")) for number in stated] == numbers


def test_the_summary_has_the_same_totals() -> None:
    (stated,) = re.findall(
        r"of ([\d,]+) requests to (\d+) layouts of tiny models on CPUs, during ([\d,]+) kills, none was answered "
        r"otherwise; in (\d+) of them",
        " ".join(SUMMARY.split()),
    )
    numbers = [total("requests"), len(ARRANGEMENTS), total("kills"), total("ties")]
    assert [int(number.replace(",", "")) for number in stated] == numbers


@pytest.mark.parametrize("layout", ARRANGEMENTS)
def test_the_document_has_the_counts_of_each_layout(layout: str) -> None:
    (row,) = re.findall(rf"^\| {re.escape(layout)} \| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert [int(cell) for cell in row.split(" | ")] == [recorded(metric, layout) for metric in COUNTS]
