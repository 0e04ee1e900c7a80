"""Attention of the layers of one stage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.kernels.interface import AttentionShape
from services.worker.engine.kernels.torch.attention import TorchAttention
from services.worker.engine.model.rotary import rotary_table

if TYPE_CHECKING:
    import torch

    from services.worker.engine.kernels.interface import AttentionBackend, KernelBackend
    from services.worker.engine.model.config import ModelConfig, RotaryConfig
    from services.worker.engine.parallel.shards import ModelShard


def attention_shape(config: ModelConfig, shard: ModelShard, page_size: int, *, has_float8_kv: bool) -> AttentionShape:
    """Return the attention of a rank's layers but for windows."""
    return AttentionShape(
        len(shard.query_heads), len(shard.kv_heads), config.head_dim, page_size,
        score_scale=config.attention_scale, attention_softcap=config.attention_softcap,
        latent_dim=config.latent.rank if config.latent else None,
        has_float8_kv=has_float8_kv,
    )  # fmt: skip


def attention_of_layers(
    backend: KernelBackend, config: ModelConfig, shapes: tuple[AttentionShape, AttentionShape], context: int,
    device: torch.device,
) -> list[AttentionBackend]:  # fmt: skip
    """Return the attention of each layer; layers of one kind share it.

    `shapes` are those of layers without a window, and with one.
    """
    kinds: dict[tuple[int | None, RotaryConfig], tuple[AttentionShape, torch.Tensor]] = {}
    for i in range(config.layers):
        window, rotary = config.window_of(i), config.rotary_of(i)
        if (window, rotary) not in kinds:
            shape = shapes[window is not None]
            if window is not None:
                shape = replace(shape, window_left=window - 1, is_chunked=config.has_chunks)
            kinds[window, rotary] = shape, rotary_table(rotary, config.at(i).rotary_dim, context, device)
    attention = {kind: backend.attention(*its) for kind, its in kinds.items()}
    if len({each.layout for each in attention.values()}) > 1:
        # Of heads of two widths, compiled attention serves only one.
        attention = {kind: TorchAttention(*its) for kind, its in kinds.items()}
    return [attention[config.window_of(i), config.rotary_of(i)] for i in range(config.layers)]
