from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, redact, rounded, short_model, write_results

if TYPE_CHECKING:
    from pathlib import Path

PROVENANCE = Provenance("pando bench x", "abc1234", "2026-01-31")


def sheet(value: float, label: str | None = None) -> ResultSheet:
    made = ResultSheet("w1", "tiny", 1, PROVENANCE, label)
    made.add("output_throughput", value, "tok/s")
    return made


def test_results_have_the_agreed_fields(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cpu.json"
    write_results(path, sheet(1234.56).results)
    assert json.loads(path.read_text()) == [
        {
            "benchmark": "w1",
            "model": "tiny",
            "tp": 1,
            "metric": "output_throughput",
            "value": 1235.0,
            "unit": "tok/s",
            "command": "pando bench x",
            "commit": "abc1234",
            "date": "2026-01-31",
        }
    ]


def test_a_later_run_replaces_the_results_that_it_measures_again(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    write_results(path, sheet(1).results)
    write_results(path, sheet(2, label="peer").results)
    write_results(path, sheet(3).results)
    assert [(entry.get("label"), entry["value"]) for entry in json.loads(path.read_text())] == [
        ("peer", 2.0),
        (None, 3.0),
    ]


def test_repeats_are_kept_with_their_spread() -> None:
    made = ResultSheet("w1", "tiny", 1, PROVENANCE)
    made.add_spread("ttft", Spread.of([3.0, 1.0, 2.0]), "ms")
    (result,) = made.results
    assert (result.value, result.low, result.high, result.repeats) == (2.0, 1.0, 3.0, 3)


def test_a_figure_that_is_not_there_is_left_out() -> None:
    made = ResultSheet("w1", "tiny", 1, PROVENANCE)
    made.add("cached_share", None, "share")
    assert made.results == []


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="not a list of results"):
        write_results(path, sheet(1).results)
    assert json.loads(path.read_text()) == {"mine": 1}


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", "sk-1", "--x"],
        ["--api-key=sk-1", "--x"],
        ["--rival-key", "sk-1", "--x"],
        ["--admin", "sk-1", "--x"],
        ["--plain=sk-1", "--x"],
    ],
)
def test_credentials_never_reach_the_results(argv: list[str]) -> None:
    assert "sk-1" not in " ".join(redact(argv))
    assert redact(argv)[-1] == "--x"


def test_provenance_names_command_commit_and_day() -> None:
    now = datetime.datetime(2026, 1, 31, 23, 59, tzinfo=datetime.UTC)
    provenance = Provenance.collect(["bench", "serve", "--label", "two words"], now)
    assert provenance.command == "pando bench serve --label 'two words'"
    assert provenance.date == "2026-01-31"
    assert provenance.commit


@pytest.mark.parametrize(("value", "shown"), [(29_612.3, 29_610.0), (0.123456, 0.1235), (3.0, 3.0), (0.0, 0.0)])
def test_values_have_four_digits(value: float, shown: float) -> None:
    assert rounded(value) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/models/tiny/Tiny.Q4.gguf", "Tiny.Q4.gguf"),
        ("./Tiny.gguf", "Tiny.gguf"),
        ("C:\\models\\Tiny.gguf", "Tiny.gguf"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("tiny", "tiny"),
    ],
)
def test_the_folders_of_a_machine_never_reach_the_results(name: str, shown: str) -> None:
    assert short_model(name) == shown
