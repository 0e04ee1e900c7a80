"""The benchmark of quantised weights, in a small form: its figures are there and possible."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.experiments.quantization import main
from deploy.evaluation.experiments.quantization_speed import QUANTISERS
from tests.services.worker.engine.families import save_family

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended


def figures_of(path: Path) -> dict[str, float]:
    return {entry["metric"]: entry["value"] for entry in json.loads(path.read_text())}


def test_each_layer_is_timed_in_every_format(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    path = tmp_path / "speed.json"
    main(["speed", str(tmp_path), "--device", "cpu", "--rows", "1", "3", "--seconds", "0", "--json", str(path)])
    figures = figures_of(path)
    assert len(figures) == 4 * 2 * (1 + len(QUANTISERS))
    assert {"qkv 48 x 128, 1 rows: bfloat16", "gate and up 48 x 160, 3 rows: fp8"} <= set(figures)
    assert all(0 < value < 1e6 for value in figures.values())


def test_only_ways_that_are_named_are_timed(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    path = tmp_path / "speed.json"
    sizes = ["--rows", "1", "--seconds", "0"]
    command = ["speed", str(tmp_path), "--device", "cpu", *sizes, "--json", str(path), "--ways"]
    main([*command, "int8", "bfloat16"])
    assert {name.split(": ")[1] for name in figures_of(path)} == {"int8", "bfloat16"}
    with pytest.raises(SystemExit, match="no such way: int7; there are: bfloat16; fp8;"):
        main([*command, "int7"])


@pytest.mark.slow
def test_fp8_weights_predict_nearly_the_same_as_wider_weights(tmp_path: Path) -> None:
    path, text = tmp_path / "accuracy.json", tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog does not care. " * 12)
    sizes = ["--tokens", "160", "--prompts", "2", "--new-tokens", "4"]
    main(["accuracy", str(text), "--device", "cpu", *sizes, "--json", str(path), "--formats", "gguf Q8_0"])
    figures = figures_of(path)
    assert figures["fp8: negative log likelihood"] == pytest.approx(figures["wide: negative log likelihood"], rel=0.2)
    assert 0 < figures["fp8: divergence"] < 0.1
    assert 0 < figures["gguf Q8_0: divergence"] < figures["fp8: divergence"]
    assert figures["fp8: likeliest tokens that are the same"] > 80
    assert 0 <= figures["fp8: tokens until the first other one"] <= 4
