"""The shapes that a model's tensors have, under the names that `transformers` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.engine.checkpoints.tensor_names import layer_of

if TYPE_CHECKING:
    from services.worker.engine.model.config import LatentConfig, ModelConfig, RecurrentConfig


def tensor_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a whole tensor: a matrix, its bias, or the weight of a norm."""
    layer = layer_of(name)
    if layer is not None:
        config = config.at(layer)
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, columns = config.hidden_size, config.intermediate_size
    if config.moe is not None and ".experts." in name:
        columns = config.moe.intermediate_size
    elif config.moe is not None and config.moe.shared is not None and ".shared_expert." in name:
        columns = config.moe.shared.intermediate_size
    if config.recurrent is not None and ".linear_attn." in name:
        return _recurrent_shape(name.partition(".linear_attn.")[2].removesuffix(".weight"), config, config.recurrent)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocabulary_size, hidden),
        "lm_head": (config.vocabulary_size, hidden),
        "score": (config.labels, hidden),
        "qkv_proj": (queries + 2 * keys, hidden),
        "q_proj": (queries * (1 + config.gated_attention), hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, config.query_heads * config.output_dim),
        "gate_up_proj": (2 * columns, hidden),
        "gate_proj": (columns, hidden),
        "up_proj": (columns, hidden),
        "down_proj": (hidden, columns),
        "gate": (config.moe.experts if config.moe else 0, hidden),
        "shared_expert_gate": (1, hidden),
        "sinks": (config.query_heads,),
        "layer_scale": (1,),
        "expert_scale": (config.moe.experts if config.moe else 0,),
    }
    if config.latent is not None:
        shapes |= _latent_matrices(config.latent, config)
    part, kind = name.split(".")[-2:]
    if part in shapes:
        return shapes[part] if kind == "weight" else shapes[part][:1]
    if part in ("q_norm", "k_norm"):
        return ((queries if part == "q_norm" else keys) if config.projection_norm else config.head_dim,)
    if config.latent is not None and part in ("q_a_layernorm", "kv_a_layernorm"):
        return (config.latent.rank if part == "kv_a_layernorm" else config.latent.query_rank or 0,)
    return (hidden,)


def _recurrent_shape(part: str, config: ModelConfig, recurrent: RecurrentConfig) -> tuple[int, ...]:
    hidden, heads = config.hidden_size, recurrent.value_heads
    values = heads * recurrent.value_dim
    return {
        "in_proj_qkvz": (recurrent.conv_width + values, hidden),
        "in_proj_ba": (2 * heads, hidden),
        "in_proj_qkv": (recurrent.conv_width, hidden),
        "in_proj_z": (values, hidden),
        "in_proj_b": (heads, hidden),
        "in_proj_a": (heads, hidden),
        "conv1d": (recurrent.conv_width, 1, recurrent.kernel),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm": (recurrent.value_dim,),
        "out_proj": (hidden, values),
    }[part]


def _latent_matrices(latent: LatentConfig, config: ModelConfig) -> dict[str, tuple[int, int]]:
    queries, hidden, query_rank = config.query_heads * latent.query_dim, config.hidden_size, latent.query_rank or 0
    return {
        "q_proj": (queries, hidden),
        "q_a_proj": (query_rank, hidden),
        "q_b_proj": (queries, query_rank),
        "kv_a_proj_with_mqa": (latent.row_width, hidden),
        "kv_b_proj": (config.query_heads * (latent.content_dim + latent.value_dim), latent.rank),
    }


def block_shape(name: str, config: ModelConfig, rows: slice | None, columns: slice | None) -> tuple[int, ...]:
    """Return the shape of some rows and columns of a tensor; None: of all of them."""
    shape = list(tensor_shape(name, config))
    for dimension, part in enumerate((rows, columns)):
        if part is not None:
            shape[dimension] = part.stop - part.start
    return tuple(shape)
