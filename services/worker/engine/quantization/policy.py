"""In which format matrices are held, and whether this model can be on this rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.quantization import fp8, grouped, int8, mxfp4
from services.worker.engine.quantization.formats import Fp8Format, GroupedFormat, Int8Format, Mxfp4Format, StoredScales

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import EngineSpec
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.shards import ModelShard
    from services.worker.engine.quantization.formats import StoredFormat
    from services.worker.engine.quantization.matrices import QuantisedMatrix

QUANTIZATIONS = ("auto", "fp8")
# From here on devices multiply FP8 (Ada).
_FIRST_FP8_CAPABILITY = (8, 9)


def held_format(spec: EngineSpec, config: ModelConfig) -> StoredFormat | None:
    """Return the format of the layers' matrices, stored so or quantised while they are read; None: as wide as stored.

    Raises:
        ConfigurationError: what is asked for is unknown, or impossible with what is stored.
    """
    if spec.quantization not in QUANTIZATIONS:
        raise ConfigurationError(f"quantization {spec.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    stored = config.stored_format
    if spec.quantization == "fp8":
        if stored is not None and not isinstance(stored, Fp8Format):
            raise ConfigurationError(
                "quantization=fp8: the checkpoint's weights are quantised in another format already; use "
                "quantization=auto"
            )
        return stored or Fp8Format(StoredScales.CHANNEL)
    return stored


def quantiser(spec: EngineSpec, config: ModelConfig) -> Callable[[torch.Tensor], QuantisedMatrix] | None:
    """Select the quantiser of matrices while they are read; None: they are used as they are stored."""
    held = held_format(spec, config)
    if config.stored_format is not None and spec.load_format != "dummy":
        return None
    match held:
        case None:
            return None
        case Fp8Format(scales=StoredScales.BLOCK):
            return fp8.quantise_blocks
        case Fp8Format(has_input_scales=True):
            return fp8.quantise_static
        case Fp8Format():
            return fp8.quantise
        case Int8Format():
            return int8.quantise
        case Mxfp4Format():
            return mxfp4.quantise
        case GroupedFormat():
            return partial(
                grouped.quantise, bits=held.bits, group=held.group_size, has_zero_points=held.has_zero_points
            )


def check_model(held: StoredFormat, config: ModelConfig, shard: ModelShard, *, is_own: bool) -> None:
    """Raise ConfigurationError if this rank has a matrix that cannot be in the format.

    Decoders that are not our own, but run through `transformers`, have none that can.
    """
    if not is_own:
        raise ConfigurationError(
            f"quantised weights: model family {config.family!r} runs through transformers, with weights as they are"
        )
    if isinstance(held, Fp8Format) and held.scales is not StoredScales.BLOCK:
        _check_widths(config, shard)


def check_device(held: StoredFormat, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raise ConfigurationError if a GPU's own kernels cannot multiply matrices in the format."""
    if isinstance(held, Fp8Format):
        _check_fp8_device(held, dtype, capability)


def _check_fp8_device(held: Fp8Format, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    if capability < _FIRST_FP8_CAPABILITY:
        raise ConfigurationError(
            f"FP8 needs a GPU of compute capability {'.'.join(map(str, _FIRST_FP8_CAPABILITY))} or later; this one has "
            f"{'.'.join(map(str, capability))}: use backend=torch, which widens the weights"
        )
    if dtype != torch.bfloat16 and held.scales is not StoredScales.BLOCK:
        raise ConfigurationError(f"FP8 products come in bfloat16 on a GPU, not in {dtype}: use dtype=bfloat16")


def _check_widths(config: ModelConfig, shard: ModelShard) -> None:
    widths = {
        "hidden_size": config.hidden_size,
        **_attention_widths(config, shard),
        "feed-forward columns": len(shard.intermediate),
        "columns of an expert": len(shard.expert_columns) if shard.expert_columns is not None else 0,
        "columns beside experts": len(shard.shared_columns) if shard.shared_columns is not None else 0,
    }
    for name, width in widths.items():
        if width % fp8.WIDTH_UNIT:
            raise ConfigurationError(
                f"FP8 needs matrices whose sides are multiples of {fp8.WIDTH_UNIT}: rank {shard.rank} of "
                f"{shard.world_size} has {width} {name}"
            )


def _attention_widths(config: ModelConfig, shard: ModelShard) -> dict[str, int]:
    heads, latent = len(shard.query_heads), config.latent
    if latent is None:
        queries, keys = heads * config.head_dim, len(shard.kv_heads) * config.head_dim
        return {"columns of query heads": queries, "columns of query, key and value heads": queries + 2 * keys}
    queries = heads * latent.query_dim
    return {
        "columns of heads' outputs": heads * latent.value_dim,
        "columns of queries": queries,
        "columns of compressed queries": latent.query_rank or 0,
        "columns of queries and rows": (latent.query_rank or queries) + latent.row_width,
    }
