from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a program is defined: without a GPU its interpreter runs them, where it is installed.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A directory with the config.json of a small Llama."""
    described = json.loads(Path("deploy/evaluation/shapes/llama-3.1-8b/config.json").read_text(encoding="utf-8"))
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 16}
    directory = tmp_path / "shape"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**described, **small}), encoding="utf-8")
    return directory
