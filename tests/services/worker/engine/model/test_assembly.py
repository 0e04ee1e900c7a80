from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from tests.services.worker.engine.driving import load
from tests.services.worker.engine.families import save_family

if TYPE_CHECKING:
    from pathlib import Path

LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("qwen2", f"{LAYER}.self_attn.q_proj.bias", (5,)),
        ("qwen3", f"{LAYER}.self_attn.q_norm.weight", (64,)),
        ("qwen3 moe", f"{LAYER}.mlp.experts.3.down_proj.weight", (48, 40)),
        ("llama", "model.embed_tokens.weight", (131, 40)),
    ],
)
def test_a_tensor_of_another_shape_is_named(family: str, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = load_file(save_family(tmp_path, family) / "model.safetensors")
    assert tensors[name].shape != shape
    save_file({**tensors, name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=rf"tensor '{name}' has the shape \({shape[0]},.*configuration says"):
        load(tmp_path)


def test_weights_that_a_config_promises_must_be_there(tmp_path: Path) -> None:
    tensors = load_file(save_family(tmp_path, "gemma3") / "model.safetensors")
    del tensors[f"{LAYER}.post_feedforward_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"no tensor 'model\.layers\.1\.post_feedforward_layernorm\.weight'"):
        load(tmp_path)
