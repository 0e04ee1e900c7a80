"""Scales of keys and values in FP8: a checkpoint's, or measured while the model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.kernels.interface import KvLayout, KvScales
from services.worker.engine.quantization.fp8 import LARGEST

if TYPE_CHECKING:
    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.parallel.shards import Span

# Tokens of which keys and values are measured. They are random: the worker has no text.
MEASURED_TOKENS = 512
# Of the largest number that was measured: other tokens may have larger ones, and FP8 is as exact for small numbers.
_MARGIN = 2.0
# Names in a layer, of keys and of values. The first are those of compressed-tensors and vLLM, the next ModelOpt's and
# older ones of compressed-tensors (vLLM reads all of them, `maybe_remap_kv_scale_name`), the last is one for both.
_NAMES = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ("self_attn.kv_scale", "self_attn.kv_scale"),
)


def stored_scales(
    checkpoint: Checkpoint, heads: tuple[Span, Span], held: Span, device: torch.device
) -> tuple[KvScales, ...]:
    """Read the scales of the rank's heads of each layer in `held`; empty: the checkpoint has none.

    `heads` are those of layers without a window, and with one.

    Raises:
        ConfigurationError: some layers have none, or scales are not positive numbers, one for all or each KV head.
    """
    config = checkpoint.config
    layers = [layer for layer in range(held.start, held.stop) if not config.is_recurrent(layer)]
    found = [next((pair for pair in _NAMES if _has(checkpoint, layer, pair)), None) for layer in layers]
    if not any(found):
        return ()
    if None in found:
        raise ConfigurationError(
            f"the checkpoint has scales of keys and values in some layers only, and none in layer {found.index(None)}"
        )
    return tuple(
        KvScales(*(_read(checkpoint, layer, name, heads[config.window_of(layer) is not None], device) for name in pair))
        for layer, pair in zip(layers, filter(None, found), strict=True)
    )


def measured_scales(pool: KvPool, layout: KvLayout) -> tuple[KvScales, ...]:
    """Return scales by which all that `pool` holds, which is not in FP8, fits with a margin.

    They are powers of two: divisions are exact, and small differences between devices hardly ever change them.
    """
    return tuple(KvScales(_fitting(layer.keys, layout), _fitting(layer.values, layout)) for layer in pool.layers)


def _fitting(numbers: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    axes = (0, 1, 3) if layout is KvLayout.TOKEN_MAJOR else (0, 2, 3)
    largest = numbers.abs().amax(dim=axes).float()
    scales = torch.exp2(torch.ceil(torch.log2(largest * _MARGIN / LARGEST)))
    return torch.where(scales.isfinite() & (scales > 0), scales, 1.0)


def _has(checkpoint: Checkpoint, layer: int, names: tuple[str, str]) -> bool:
    return all(checkpoint.has(f"model.layers.{layer}.{name}") for name in names)


def _read(checkpoint: Checkpoint, layer: int, part: str, heads: Span, device: torch.device) -> torch.Tensor:
    """Return [heads] float32."""
    name = f"model.layers.{layer}.{part}"
    stored, count = checkpoint.read(name).flatten().float(), checkpoint.config.at(layer).kv_heads
    if len(stored) not in (1, count) or not bool((stored.isfinite() & (stored > 0)).all()):
        raise ConfigurationError(
            f"tensor {name!r} has to be one positive number or {count}, one for each KV head; it has {len(stored)}"
            f"{'' if len(stored) not in (1, count) else ', not all of them positive'}"
        )
    return stored.expand(count)[heads.scaled(1)].to(device, copy=True).contiguous()
