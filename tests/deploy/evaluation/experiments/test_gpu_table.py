"""The driver of the GPU table, with an engine that makes tokens up in the place of a GPU."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from deploy.evaluation.bench.results import Result, read_results, write_results
from deploy.evaluation.experiments import gpu_table
from deploy.evaluation.experiments.gpu_table import (
    PARTS,
    SHAPES,
    OutOfTimeError,
    TablePart,
    add,
    add_figures,
    main,
    measure,
)
from deploy.evaluation.experiments.remote_prefills import PrefillCounts, parse_remote_prefills

OFFLINE = "pando bench offline --workload random --requests 2 --output-tokens 4 --tp {tp} --json {json}"
RUNS = ((1.0, None), (2.0, "8/s"))
FAKE = ("model.load_format=fake", "scheduler.device_pages=64")


@pytest.mark.soak
def test_loads_find_the_part_s_deployment_and_their_figures_name_the_table(tmp_path: Path) -> None:
    part = TablePart("small", (OFFLINE, "pando bench offline --workload nonsense"), "qwen3-0.6b", settings=FAKE)
    codes = [code for _, code in measure(part, tmp_path / "results.json", math.inf)]
    assert codes[0] == 0
    assert codes[1] != 0
    found = read_results(tmp_path / "results.json")
    assert {result.model for result in found} == {"qwen3-0.6b (fake)"}
    assert {result.command for result in found} == {"python -m deploy.evaluation.experiments.gpu_table small"}


def test_results_of_a_second_run_are_kept_next_to_the_first(tmp_path: Path) -> None:
    found, results = tmp_path / "found.json", tmp_path / "results.json"
    provenance = ("pando bench", "abc", "2026-01-01")
    measured = [Result("w1", "small", 1, "speed", value, "tok/s", *provenance, label) for value, label in RUNS]
    write_results(found, measured)
    for label in (None, "second run"):
        add(found, results, TablePart("small", ()), None, label)
    labels = [result.label for result in read_results(results)]
    assert sorted(labels, key=str) == ["8/s", "8/s, second run", None, "second run"]


def test_a_load_s_figures_say_how_much_of_the_transfers_was_hidden(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    write_results(found, [Result("w1", "small", 1, "speed", 1.0, "tok/s", "pando bench", "abc", "2026-01-01", "8/s")])
    before = parse_remote_prefills(metrics_text(asked=1, fetched=1, transfer_s=5.0, exposed_s=5.0, copied=0, copy_s=0))
    after = parse_remote_prefills(metrics_text(asked=6, fetched=5, transfer_s=7.0, exposed_s=5.5, copied=3e9, copy_s=2))
    add_figures(found, after.since(before) + PrefillCounts())
    figures = {(result.metric, result.label): result.value for result in read_results(found)}
    assert figures == {
        ("speed", "8/s"): 1.0,
        ("remote_prefills_asked", "8/s"): 5,
        ("remote_prefills_fetched", "8/s"): 4,
        ("remote_prefills_failed", "8/s"): 1,
        ("transfer_mean", "8/s"): 500.0,
        ("transfer_exposed_mean", "8/s"): 125.0,
        ("transfer_hidden_share", "8/s"): 0.75,
        ("transfer_rate", "8/s"): 1.5,
    }


def test_a_load_without_remote_prefills_has_no_such_figures(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    write_results(found, [Result("w1", "small", 1, "speed", 1.0, "tok/s", "pando bench", "abc", "2026-01-01")])
    add_figures(found, PrefillCounts())
    assert [result.metric for result in read_results(found)] == ["speed"]


def metrics_text(
    *, asked: float, fetched: float, transfer_s: float, exposed_s: float, copied: float, copy_s: float
) -> str:
    """Return a scheduler's metrics after `asked` remote prefills, one of which fails if there are several."""
    prefix = "pando_scheduler_"
    return "".join(
        f"{prefix}{name} {value}\n"
        for name, value in (
            ('remote_prefills_total{outcome="asked"}', asked),
            ('remote_prefills_total{outcome="fetched"}', fetched),
            ('remote_prefills_total{outcome="failed"}', int(asked > 1)),
            ("remote_prefill_transfer_seconds_total", transfer_s),
            ("remote_prefill_exposed_seconds_total", exposed_s),
            ('transfer_bytes_total{direction="peer_to_host"}', copied),
            ('transfer_bytes_total{direction="device_to_host"}', 123.0),
            ('transfer_seconds_total{direction="peer_to_host"}', copy_s),
        )
    )


def test_no_load_begins_after_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfTimeError):
        next(measure(TablePart("late", ("python -c 'raise SystemExit(3)'",)), None, time.monotonic() - 1))
    monkeypatch.setattr(gpu_table, "PARTS", (TablePart("wrong", ("python -c 'raise SystemExit(3)'",)),))
    assert main(["wrong"]) == 1
    assert main(["wrong", "--seconds", "-1"]) == 1


def test_every_part_is_listed_with_commands_and_has_a_shape_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    for part in PARTS:
        assert f"{part.name}\n    p" in printed
        assert part.shape is None or Path(SHAPES, part.shape, "config.json").is_file()


def test_an_unknown_part_is_an_error_that_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["qwen4"])
    assert "qwen3-14b-tp4" in capsys.readouterr().err
