"""Checkpoints with matrices in FP8, as the tools that quantise them write them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from services.worker.engine.quantization.fp8 import FP8, LARGEST

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}
# What llm-compressor's FP8_DYNAMIC puts into config.json.
FP8_DYNAMIC: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {**_NUMBERS, "dynamic": True, "strategy": "token", "observer": None},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**_NUMBERS, "dynamic": False, "strategy": "channel", "observer": "minmax"},
        }
    },
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
PER_TENSOR: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}


def store_in_fp8(directory: Path, scheme: Mapping[str, Any] = FP8_DYNAMIC, *, but: tuple[str, ...] = ()) -> None:
    """Rewrite the checkpoint in `directory`: its projections become FP8, but for names that contain one of `but`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith("_proj.weight") or any(part in name for part in but):
            tensors[name] = tensor
            continue
        absolute = tensor.float().abs()
        largest = absolute.amax() if scheme["quant_method"] == "fp8" else absolute.amax(dim=1, keepdim=True)
        tensors[f"{name}_scale"] = largest / LARGEST
        tensors[name] = (tensor / (largest / LARGEST)).to(FP8)
    save_file(tensors, directory / "model.safetensors")
    change_config(directory, quantization_config=dict(scheme))


def change_config(directory: Path, **changes: object) -> None:
    """Rewrite some fields of config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def changed(scheme: Mapping[str, Any], group: str, **changes: object) -> dict[str, Any]:
    """Return FP8_DYNAMIC with other `weights` or `input_activations`."""
    groups = {"group_0": {**scheme["config_groups"]["group_0"]}}
    groups["group_0"][group] = {**groups["group_0"][group], **changes}
    return {**scheme, "config_groups": groups}
