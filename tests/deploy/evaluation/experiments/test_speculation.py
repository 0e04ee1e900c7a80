"""Drafts of a shape: figures of each number of rows and acceptance, beside those that the file has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.evaluation.bench.results import read_results
from deploy.evaluation.experiments.speculation import main

if TYPE_CHECKING:
    import pytest

SHAPE = Path("deploy/evaluation/shapes/llama-3.1-8b/config.json")
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 10_240, "max_position_embeddings": 1024,
}  # fmt: skip


def run(folder: Path, *flags: str) -> list[str]:
    shape = folder / "small"
    shape.mkdir(exist_ok=True)
    (shape / "config.json").write_text(json.dumps(json.loads(SHAPE.read_text(encoding="utf-8")) | SMALL))
    file = folder / "results.json"
    arguments = [str(shape), "--device", "cpu", "--prompt", "20", "--new-tokens", "12", "--json", str(file), *flags]
    assert main(arguments) == 0
    return [result.metric for result in read_results(file) if result.model == "small (dummy)"]


def test_right_drafts_are_accepted_and_wrong_ones_are_not(tmp_path: Path) -> None:
    run(tmp_path, "--rows", "2", "--acceptance", "0", "1")
    found = {result.metric: result for result in read_results(tmp_path / "results.json")}
    assert found["2 rows, acceptance 0: accepted of drafted"].value == 0
    # In a round on a busy machine, measured costs may leave no drafts at all.
    assert found["2 rows, acceptance 1: accepted of drafted"].high == 100
    assert (found["2 rows, acceptance 1: tokens per row and pass"].high or 0) > 1
    assert found["2 rows, acceptance 1: accepted of drafted"].repeats == 3


def test_no_round_begins_after_the_time_limit_and_others_figures_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"benchmark": "speculation", "model": "another", "tp": 1, "metric": "copy: gain", "value": 2.0, "unit": "%",
            "command": "before", "commit": "0", "date": "2026-01-01"}  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps([kept]))
    metrics = run(tmp_path, "--rows", "1", "2", "--acceptance", "0", "--time-limit", "0")
    assert "not measured again: 2" in capsys.readouterr().err
    assert len(metrics) == 8
    assert all(metric.startswith("1 rows") for metric in metrics)
    assert json.loads((tmp_path / "results.json").read_text())[0] == kept
