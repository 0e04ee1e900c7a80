"""Fields of config.json that most families have, as `transformers` 4 and 5 write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from common.errors import ConfigurationError
from services.worker.engine.model.config import Activation, ModelConfig, RotaryConfig
from services.worker.engine.model.rotary_config import read_rotary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.model.family import JsonConfig

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}

# Far more than any model has; each takes memory while a file is read.
MAX_LAYERS: Final = 4096
_REQUIRED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SIZES: Final = (*_REQUIRED, "intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings")


def check_sizes(config: JsonConfig) -> None:
    """Check the numbers that most files have.

    Raises:
        ConfigurationError: one is no positive whole number, or there are too many layers.
        KeyError: one that no family derives is missing or null.
    """
    if absent := [name for name in _REQUIRED if config.get(name) is None]:
        raise KeyError(absent[0])
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f"{name} of config.json should be a positive whole number, got {value!r}")
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise ConfigurationError(f"num_hidden_layers of config.json should be at most {MAX_LAYERS}")


def read_decoder(config: JsonConfig, *, can_be_partial: bool = False) -> ModelConfig:
    """Read a config.json of Llama's fields; families replace that by which they differ.

    `can_be_partial`: whether the family may rotate a part of each head.

    Raises:
        ConfigurationError: an option is not supported.
        KeyError: a field is missing.
    """
    hidden_size, query_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // query_heads
    attention_bias = bool(config.get("attention_bias", False))
    refuse(config, "use_bidirectional_attention")
    return ModelConfig(
        family="",  # `config_from_json` enters it
        vocabulary_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        query_heads=query_heads,
        kv_heads=config.get("num_key_value_heads") or query_heads,
        head_dim=head_dim,
        max_context=int(config["max_position_embeddings"]),
        norm_epsilon=config["rms_norm_eps"],
        rotary=_rotary(config, head_dim, can_be_partial=can_be_partial),
        # Left out, transformers' own default holds: false in most families.
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        activation=read_activation(config),
    )


def refuse(config: JsonConfig, *options: str) -> None:
    """Raise a ConfigurationError if one of `options` is set: it would change the results, and is not supported."""
    for option in options:
        if config.get(option):
            raise ConfigurationError(f"{option}: {config[option]!r} is not supported")


def read_activation(config: JsonConfig) -> Activation:
    """Return the activation function of feed-forward layers."""
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    name = config.get(key, Activation.SILU.value)
    if name not in _ACTIVATIONS:
        raise ConfigurationError(f"{key}: {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_windows(config: JsonConfig, kinds: Sequence[str], *, is_used: bool = False) -> tuple[int | None, ...]:
    """Return the window of each layer; see `ModelConfig.windows`.

    Args:
        config: the file; it may have a `sliding_window` that `use_sliding_window` switches off.
        kinds: `SLIDING` or `FULL` of each layer, where the file has no `layer_types`.
        is_used: whether the window counts where `use_sliding_window` is missing.
    """
    window = config.get("sliding_window")
    # A window of the whole context hides nothing.
    if not window or window >= config["max_position_embeddings"] or not config.get("use_sliding_window", is_used):
        return ()
    return layer_windows(int(window), config.get("layer_types") or kinds)


def read_chunks(config: JsonConfig, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Return the chunk of each layer, where the file has an `attention_chunk_size`; see `ModelConfig.has_chunks`."""
    chunk = config.get("attention_chunk_size")
    if not chunk or chunk >= config["max_position_embeddings"]:
        return ()
    return layer_windows(int(chunk), config.get("layer_types") or kinds, CHUNKED)


def layer_windows(window: int, kinds: Sequence[str], limited: str = SLIDING) -> tuple[int | None, ...]:
    """Return `window` of layers of the kind `limited`, and None of those that see everything."""
    unknown = set(kinds) - {limited, FULL}
    if unknown:
        raise ConfigurationError(f"layer_types: {', '.join(sorted(unknown))} are not supported")
    return tuple(window if kind == limited else None for kind in kinds)


def read_local_rotary(
    config: JsonConfig, head_dim: int, theta: float, local_theta: float
) -> tuple[RotaryConfig, RotaryConfig]:
    """Return the rotary embeddings of layers without and with a window, which have parameters of their own."""
    by_kind = config.get("rope_parameters") or {}
    context = config["max_position_embeddings"]
    everywhere = by_kind.get(FULL) or config.get("rope_scaling") or {}
    local = by_kind.get(SLIDING) or {}
    return (
        read_rotary(everywhere, config.get("rope_theta", theta), head_dim, context),
        read_rotary(local, config.get("rope_local_base_freq", local_theta), head_dim, context),
    )


def token_ids(value: Any) -> tuple[int, ...]:  # free JSON
    """Return ids of tokens that a file gives as one, a list or null."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _rotary(config: JsonConfig, head_dim: int, *, can_be_partial: bool) -> RotaryConfig:
    stated = config.get("rope_parameters") or {}
    if SLIDING in stated or FULL in stated:  # see `read_local_rotary`
        stated = stated.get(FULL, {})
    parameters = dict(config.get("rope_scaling") or {})
    parameters.update(stated)
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    theta, context = config.get("rope_theta", 10000.0), config["max_position_embeddings"]
    return read_rotary(parameters, theta, head_dim, context, can_be_partial=can_be_partial)
