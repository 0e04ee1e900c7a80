"""Every kind of rotary embedding against `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ConfigurationError
from services.worker.engine.model.config import RotaryConfig, no_rotation
from services.worker.engine.model.rotary import rotary_table
from services.worker.engine.model.rotary_config import read_rotary

HEAD_DIM = 128
POSITIONS = 20_000
CONTEXT = 32_768
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
     "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
     "mscale": 0.707, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096,
     "attention_factor": 1.3},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 4096},
]  # fmt: skip


@pytest.mark.parametrize("parameters", KINDS, ids=lambda parameters: str(parameters["rope_type"]))
def test_rotary_angles_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        head_dim=HEAD_DIM, hidden_size=512, num_attention_heads=4, max_position_embeddings=CONTEXT
    )
    # Set afterwards: its own check refuses the factor that its code can do without.
    config.rope_parameters = dict(parameters)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rotary = read_rotary(parameters, 1.0, HEAD_DIM, CONTEXT)
    assert rotary.amplitude == pytest.approx(amplitude)
    table = rotary_table(rotary, HEAD_DIM, POSITIONS, torch.device("cpu"))
    angles = torch.arange(float(POSITIONS))[:, None] * frequencies[None]
    expected = torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude
    # A frequency that differs in its last bit has turned by a thousandth after 20,000 tokens.
    torch.testing.assert_close(table, expected, atol=3e-3, rtol=0)
    torch.testing.assert_close(table[:100], expected[:100], atol=3e-5, rtol=0)


def test_without_rope_parameters_nothing_is_scaled() -> None:
    assert read_rotary({}, 10000.0, HEAD_DIM, CONTEXT) == RotaryConfig(10000.0)


def test_the_rotary_table_without_rotation_is_the_identity() -> None:
    table = rotary_table(no_rotation(8), 8, 3, torch.device("cpu"))
    assert table.tolist() == [[1.0] * 4 + [0.0] * 4] * 3


def test_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'dynamic' is not supported; supported: default, linear, llama3"):
        read_rotary({"rope_type": "dynamic"}, 10000.0, HEAD_DIM, CONTEXT)
