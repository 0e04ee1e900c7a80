"""Passes of an encoder without a GPU: whole, and its layers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.bench.results import read_results
from deploy.evaluation.experiments.encoder_passes import main

if TYPE_CHECKING:
    from pathlib import Path


def test_an_encoder_and_its_layers_are_timed(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    sizes = ["--rows", "4", "--columns", "6", "--images", "1", "2", "--repeats", "2"]
    assert main(["deploy/evaluation/shapes/qwen2.5-vl-tiny", "--device", "cpu", *sizes, "--json", str(file)]) == 0
    found = {result.metric: result for result in read_results(file)}
    assert set(found) == {f"{part}, {count} at once" for part in ("encoded", "layers, launched") for count in (1, 2)}
    assert all(result.value > 0 and result.repeats == 2 for result in found.values())
