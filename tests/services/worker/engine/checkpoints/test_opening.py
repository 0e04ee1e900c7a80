from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.dummy import DummyCheckpoint
from services.worker.engine.checkpoints.gguf_file import GgufCheckpoint
from services.worker.engine.checkpoints.opening import open_checkpoint
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsCheckpoint
from tests.services.worker.engine.families import save_family

if TYPE_CHECKING:
    from pathlib import Path

BUNDLED = "smollm2-135m-instruct"


def test_the_format_follows_from_the_files(tmp_path: Path) -> None:
    directory = str(save_family(tmp_path, "llama"))
    assert isinstance(open_checkpoint(directory, "auto"), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(directory, "safetensors"), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(BUNDLED, "auto"), GgufCheckpoint)
    assert isinstance(open_checkpoint(BUNDLED, "gguf"), GgufCheckpoint)


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    (save_family(tmp_path, "llama") / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    assert isinstance(checkpoint, DummyCheckpoint)
    assert checkpoint.config.layers == 3
    assert open_checkpoint(BUNDLED, "dummy").config.layers == 30


@pytest.mark.parametrize("load_format", ["safetensors", "fake", ""])
def test_a_format_that_does_not_fit_is_refused(load_format: str) -> None:
    with pytest.raises(ConfigurationError, match="load_format"):
        open_checkpoint(BUNDLED, load_format)
