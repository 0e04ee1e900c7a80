"""The highest rate that keeps limits, from results of loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.evaluation.bench.results import Result, write_results
from deploy.evaluation.experiments.goodput import RESULTS, main, parse_limits, rated_loads

ROOT = Path(__file__).resolve().parents[4]
# Layout, tokens of the prompts, rate, and the figures: the p99 of first tokens and of gaps, in ms, failed requests.
LOADS = (
    ("one", "8,192", 3, 500.0, 20.0, 0),
    ("one", "8,192", 4.5, 1500.0, 49.0, 0),
    ("one", "8,192", 6, 2500.0, 49.0, 0),
    ("two", "8,192", 3, 500.0, 80.0, 0),
    ("two", "8,192", 4.5, 500.0, 90.0, 0),
    ("one", "1,784", 16, 500.0, 20.0, 0),
    ("one", "1,784", 20, 500.0, 20.0, 1),
    ("two", "1,784", 16, 500.0, 20.0, 0),
)


PROVENANCE = ("command", "abc", "2026-01-01")


@pytest.fixture(name="results")
def written(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    found = [Result("serve", "8b", 1, "ttft_p99", 1.0, "ms", *PROVENANCE, "256 streams")]
    for layout, tokens, rate, ttft, itl, failed in LOADS:
        figures = {"ttft_p99": ttft, "itl_p99": itl, "failed_any": failed, "output_throughput": 100 * rate}
        label = f"{layout}, {tokens} in, {rate} requests/s"
        found += [Result("serve", "8b", 1, name, value, "", *PROVENANCE, label) for name, value in figures.items()]
    write_results(path, found)
    return path


def test_the_highest_rate_that_keeps_the_limits_is_shown_with_the_next_one(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(results), "--limits", "ttft_p99=2000,itl_p99=50"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row] == [
        ["1,784 in", "one", "16", "1,600", "20"],
        ["1,784 in", "two", "16", "1,600", "not measured"],
        ["8,192 in", "one", "4.5", "450", "6"],
        ["8,192 in", "two", "none", "", "3"],
    ]


@pytest.mark.parametrize(
    ("limits", "reason"), [("ttft_p99", "are written as"), ("ttft_p99=soon", "soon"), ("e2e_p99=1", "has no e2e_p99")]
)
def test_limits_that_cannot_be_judged_are_refused(
    results: Path, capsys: pytest.CaptureFixture[str], limits: str, reason: str
) -> None:
    with pytest.raises(SystemExit):
        main([str(results), "--limits", limits])
    assert reason in capsys.readouterr().err


def test_results_without_rates_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.json")])
    assert "no loads at a rate" in capsys.readouterr().err


def test_the_repository_s_results_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main([str(RESULTS)]) == 0


def test_limits_are_numbers_by_metric() -> None:
    assert parse_limits("ttft_p99=2000,itl_p99=50") == {"ttft_p99": 2000.0, "itl_p99": 50.0}
    assert rated_loads([]) == []
