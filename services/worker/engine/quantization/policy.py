"""Whether matrices are held in FP8, and whether this model can be on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.quantization.fp8 import WIDTH_UNIT

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.shards import ModelShard

QUANTIZATIONS = ("auto", "fp8")
# From here on devices multiply FP8 (Ada).
_FIRST_CAPABILITY = (8, 9)


def holds_fp8(spec: EngineSpec, config: ModelConfig) -> bool:
    """Return whether the layers' matrices are held in FP8, stored so or quantised while they are read.

    Raises:
        ConfigurationError: what is asked for is unknown.
    """
    if spec.quantization not in QUANTIZATIONS:
        raise ConfigurationError(f"quantization {spec.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    return spec.quantization == "fp8" or config.stored_scales is not None


def quantises(spec: EngineSpec, config: ModelConfig) -> bool:
    """Return whether matrices are quantised while they are read; matrices stored in FP8 are used unchanged."""
    return holds_fp8(spec, config) and (config.stored_scales is None or spec.load_format == "dummy")


def check_model(config: ModelConfig, shard: ModelShard, *, is_own: bool) -> None:
    """Raise ConfigurationError if this rank has a matrix that cannot be in FP8.

    Decoders that are not our own, but run through `transformers`, have none that can.
    """
    if not is_own:
        raise ConfigurationError(
            f"quantization=fp8: model family {config.family!r} runs through transformers, with weights as they are"
        )
    queries, keys = (len(heads) * config.head_dim for heads in (shard.query_heads, shard.kv_heads))
    widths = {
        "hidden_size": config.hidden_size,
        "columns of query heads": queries,
        "columns of query, key and value heads": queries + 2 * keys,
        "feed-forward columns": len(shard.intermediate),
        "columns of an expert": len(shard.expert_columns) if shard.expert_columns is not None else 0,
    }
    for name, width in widths.items():
        if width % WIDTH_UNIT:
            raise ConfigurationError(
                f"FP8 needs matrices whose sides are multiples of {WIDTH_UNIT}: rank {shard.rank} of "
                f"{shard.world_size} has {width} {name}"
            )


def check_device(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raise ConfigurationError if a GPU cannot multiply FP8, or not with activations of this type."""
    if capability < _FIRST_CAPABILITY:
        raise ConfigurationError(
            f"FP8 needs a GPU of compute capability {'.'.join(map(str, _FIRST_CAPABILITY))} or later; this one has "
            f"{'.'.join(map(str, capability))}: use backend=torch, which widens the weights"
        )
    if dtype != torch.bfloat16:
        raise ConfigurationError(f"FP8 products come in bfloat16 on a GPU, not in {dtype}: use dtype=bfloat16")
