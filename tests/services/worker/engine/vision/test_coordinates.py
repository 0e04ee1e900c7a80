"""Texts of models with positions on several axes, given as coordinates, as graphs take them, or as positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.vision.models import VOCABULARY, save, save_wide

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.model_runner import ModelRunner

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def runner_on(directory: Path, family: str, device: str) -> ModelRunner:
    if device == "cuda":
        return load(save_wide(directory, family), backend="gpu", device=device, dtype="bfloat16", vision=True)
    return load(save(directory, family), backend="torch", device=device, vision=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
def test_positions_as_coordinates_on_each_axis_give_the_same_bits(family: str, device: str, tmp_path: Path) -> None:
    runner = runner_on(tmp_path, family, device)
    assert runner.vision_config is not None
    assert runner.vision_config.axes
    driver, ids = Driver(runner), random_ids(60, VOCABULARY)
    decoding, fresh = driver.open(40), driver.open(40)
    driver.run([(decoding, ids[:30])])
    batch = driver.batch([(decoding, ids[30:31]), (fresh, ids[31:55])], all_tokens=True)
    with torch.inference_mode():
        alone = runner.hidden_states(batch).clone()
        axes = batch.positions.expand(3, -1)
        assert torch.equal(runner.hidden_states(replace(batch, coordinates=axes)), alone)
        others = runner.hidden_states(replace(batch, coordinates=axes + torch.arange(3, device=axes.device)[:, None]))
        assert not torch.equal(others, alone), "coordinates matter"
    runner.close()
