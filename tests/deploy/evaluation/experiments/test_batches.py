"""The experiment on batches, in a small form: both commands write their figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.experiments.batches import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended
FAKE = ["--step-ms", "1", "--rounds", "2", "--input-tokens", "16", "--output-tokens", "8"]


def figures_of(path: Path) -> dict[str, float]:
    return {entry["metric"]: entry["value"] for entry in json.loads(path.read_text())}


def test_the_throughput_of_both_ways_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    main(["throughput", *FAKE, "--requests", "20", "--idle-s", "0", "--json", str(path)])
    figures = figures_of(path)
    assert figures.keys() == {"offline", "batch", "batch / offline"}
    assert all(value > 0 for value in figures.values())


def test_latencies_with_and_without_a_batch_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    # They take many times as long as the load beside them.
    lines = ["--lines", "1500", "--line-input-tokens", "16", "--line-output-tokens", "256"]
    main(["interference", *FAKE, "--rates", "4", "--seconds", "2", *lines, "--json", str(path)])
    figures = figures_of(path)
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        assert figures[f"{name}, without"] > 0
        assert figures[f"{name}, with a batch"] > 0
        assert f"{name} increase" in figures


def test_a_batch_that_ends_too_soon_is_no_measurement(tmp_path: Path) -> None:
    command = ["interference", *FAKE, "--rates", "4", "--seconds", "3", "--lines", "2", "--line-output-tokens", "8"]
    with pytest.raises(SystemExit, match="more --lines"):
        main([*command, "--json", str(tmp_path / "results.json")])
