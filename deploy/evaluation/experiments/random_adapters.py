"""Random adapters of a model's shape, for benchmarks."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from services.worker.engine.checkpoints.safetensors_directory import read_config
from services.worker.engine.checkpoints.tensor_shapes import tensor_shape

if TYPE_CHECKING:
    from pathlib import Path

MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip


def adapter_names(count: int) -> list[str]:
    """Return the names of the first adapters."""
    return [f"a{number}" for number in range(count)]


def make_adapters(model: Path, folder: Path, rank: int, count: int) -> dict[str, str]:
    """Write random adapters of attention and feed-forward layers as PEFT would; return their directories, by name.

    All have the same file of factors and different scales, so that they are made in seconds; for a server they are as
    different as any others.
    """
    config, generator, tensors = read_config(model), torch.Generator().manual_seed(0), {}
    for layer in range(config.layers):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            height, width = tensor_shape(f"{name}.weight", config)
            for side, shape in (("A", (rank, width)), ("B", (height, rank))):
                factor = torch.randn(math.prod(shape), generator=generator) * 0.02
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = factor.view(shape).bfloat16()
    factors = folder / "factors.safetensors"
    save_file(tensors, factors)
    made = {}
    for number, name in enumerate(adapter_names(count)):
        target = folder / name
        target.mkdir()
        os.link(factors, target / "adapter_model.safetensors")
        described = {
            "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank + number / 64,
            "base_model_name_or_path": str(model), "target_modules": [name.split(".")[1] for name in MODULES],
        }  # fmt: skip
        (target / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
        made[name] = str(target)
    return made
