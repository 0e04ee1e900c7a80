"""gpt-oss as it is published, with experts in MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.quantization.mxfp4 import quantise
from tests.services.worker.engine.families import save_family
from tests.services.worker.engine.quantization.fp8_checkpoints import change_config

if TYPE_CHECKING:
    from pathlib import Path

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def save_published(directory: Path) -> tuple[Path, Path]:
    """Write a tiny gpt-oss as it is published, and with the same weights as `transformers` dequantises them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    published, wide = directory / "published", directory / "wide"
    save_family(published, "gpt-oss")
    save_family(wide, "gpt-oss")
    tensors, dequantised = {}, {}
    for name, tensor in load_file(published / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = dequantised[name] = tensor
            continue
        blocks, scales = zip(*(stored_blocks(expert.t()) for expert in tensor), strict=True)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = torch.stack(blocks), torch.stack(scales)
        dequantised[name] = convert_moe_packed_tensors(
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32
        )
    save_file(tensors, published / "model.safetensors")
    save_file(dequantised, wide / "model.safetensors")
    change_config(published, quantization_config=MXFP4)
    return published, wide


def stored_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks [out, in / 32, 16], the even input of a byte in its lower bits, and scales [out, in / 32]."""
    matrix = quantise(weight)
    codes = matrix.values.view(weight.shape[0], -1, 16, 2)
    return codes[..., 0] | (codes[..., 1] << 4), (matrix.scales.float().log2() + 127).to(torch.uint8)
