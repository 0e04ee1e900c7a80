"""The shape of a decoder from the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.model.config import Activation, ModelConfig, MoeConfig, RotaryConfig
from services.worker.engine.model.rotary_config import yarn_amplitude, yarn_divisors

if TYPE_CHECKING:
    from collections.abc import Mapping

# GGUF's name of each architecture, and the family it is; Mistral is called `llama`.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10_000.0
# The one size of Gemma 3 whose scores are scaled by its width; GGUF files do not contain that.
_GEMMA3_27B_LAYERS = 62


def config_from_gguf(fields: Mapping[str, Any], *, tied_embeddings: bool, divisors: tuple[float, ...]) -> ModelConfig:
    """Read a GGUF file's metadata.

    `divisors` are its tensor `rope_freqs.weight`, if there is one.

    Raises:
        ConfigurationError: the architecture is not supported, or a field is missing.
    """
    try:
        architecture = fields["general.architecture"]
        if architecture not in ARCHITECTURES:
            raise ConfigurationError(
                f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
        return _read(ARCHITECTURES[architecture], _Fields(prefix, own), fields, tied_embeddings, divisors)
    except KeyError as error:
        raise ConfigurationError(f"the GGUF file has no field {error.args[0]!r}") from error


class _Fields(dict[str, Any]):
    """An architecture's fields without its name in front, which errors add again."""

    def __init__(self, prefix: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._prefix = prefix

    def __missing__(self, key: str) -> Any:  # as dict's
        raise KeyError(self._prefix + key)


def _read(
    family: str, own: _Fields, fields: Mapping[str, Any], tied_embeddings: bool, divisors: tuple[float, ...]
) -> ModelConfig:
    is_gemma = family == "gemma3_text"
    hidden_size, query_heads = own["embedding_length"], own["attention.head_count"]
    head_dim = own.get("attention.key_length", hidden_size // query_heads)
    if own.get("rope.dimension_count", head_dim) != head_dim:
        raise ConfigurationError("rope.dimension_count: partial rotary embedding is not supported")
    layers = own["block_count"]
    eos = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    return ModelConfig(
        family=family,
        vocabulary_size=own.get("vocab_size") or len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=own["feed_forward_length"],
        layers=layers,
        query_heads=query_heads,
        kv_heads=own.get("attention.head_count_kv", query_heads),
        head_dim=head_dim,
        max_context=own["context_length"],
        norm_epsilon=own["attention.layer_norm_rms_epsilon"],
        rotary=_rotary(own, head_dim, divisors),
        tied_embeddings=tied_embeddings,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        # Gemma's activations overflow in float16.
        dtype="bfloat16" if is_gemma else "float16",
        windows=_windows(own, layers, is_gemma),
        local_rotary=RotaryConfig(own.get("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)) if is_gemma else None,
        attention_scale=(hidden_size / query_heads) ** -0.5 if is_gemma and layers == _GEMMA3_27B_LAYERS else None,
        activation=Activation.GELU_TANH if is_gemma else Activation.SILU,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        # Converters have added the one that Gemma's norms lack.
        norm_offset=0.0,
        post_norms=is_gemma,
        logits_softcap=own.get("final_logit_softcapping"),
        moe=_moe(own) if family == "qwen3_moe" else None,
    )


def _windows(own: _Fields, layers: int, is_gemma: bool) -> tuple[int | None, ...]:
    window = own.get("attention.sliding_window", 0)
    if not window:
        return ()
    pattern = own.get("attention.sliding_window_pattern", _GEMMA3_PATTERN if is_gemma else 0)
    if isinstance(pattern, int):
        pattern = [not pattern or (i + 1) % pattern != 0 for i in range(layers)]
    return tuple(int(window) if is_local else None for is_local in pattern)


def _rotary(own: _Fields, head_dim: int, divisors: tuple[float, ...]) -> RotaryConfig:
    theta = own.get("rope.freq_base", 10000.0)
    match own.get("rope.scaling.type", "none"):
        case "none":
            return RotaryConfig(theta, divisors)
        case "linear":
            return RotaryConfig(theta, (float(own["rope.scaling.factor"]),) * (head_dim // 2))
        case "yarn":
            factor = float(own["rope.scaling.factor"])
            parameters = {
                "original_max_position_embeddings": own["rope.scaling.original_context_length"],
                "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
            }
            amplitude = yarn_amplitude(factor) * own.get("rope.scaling.yarn_attn_factor", 1.0)
            return RotaryConfig(theta, yarn_divisors(theta, head_dim, factor, parameters), amplitude)
        case other:
            raise ConfigurationError(
                f"rope scaling {other!r} is not supported in GGUF files; supported: none, linear, yarn"
            )


def _moe(own: _Fields) -> MoeConfig:
    return MoeConfig(
        experts=own["expert_count"],
        experts_per_token=own["expert_used_count"],
        intermediate_size=own["expert_feed_forward_length"],
        normalizes_routing_weights=True,
    )
