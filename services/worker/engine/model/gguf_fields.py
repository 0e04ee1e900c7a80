"""Metadata of GGUF files that most families have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.model.config import (
    ExpertGroups,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RouterScores,
    SharedExperts,
)
from services.worker.engine.model.rotary_config import yarn_amplitude, yarn_divisors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# The values of `expert_gating_func`.
_SCORES = {1: RouterScores.SOFTMAX, 2: RouterScores.SIGMOID}


class GgufFields(dict[str, Any]):
    """An architecture's fields without its name in front, which errors add again.

    `tensors` are the names of the file's tensors, by which some options are recognised. `divisors` are its tensor
    `rope_freqs.weight` or `rope_factors_short.weight`, if there is one, and `long_divisors` its tensor
    `rope_factors_long.weight`.
    """

    def __init__(
        self, architecture: str, fields: Mapping[str, Any], *, tensors: Collection[str], divisors: tuple[float, ...],
        long_divisors: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        """Keep those of `fields` that belong to `architecture`, and what is needed of the others."""
        self._prefix = f"{architecture}."
        super().__init__(
            {key.removeprefix(self._prefix): value for key, value in fields.items() if key.startswith(self._prefix)}
        )
        self.everything = fields
        self.tensors = tensors
        self.divisors = divisors
        self.long_divisors = long_divisors

    def __missing__(self, key: str) -> Any:  # as dict's
        raise KeyError(self._prefix + key)

    @property
    def layers(self) -> int:
        """The model's own layers, without those of multi-token prediction that follow them."""
        return int(self["block_count"] - self.get("nextn_predict_layers", 0))

    def has_tensor(self, part: str) -> bool:
        """Whether some layer has the tensor `part`, such as `attn_q.bias`."""
        return any(name.endswith(f".{part}") for name in self.tensors)


def read_gguf_decoder(own: GgufFields, *, can_be_partial: bool = False, truncates_yarn: bool = True) -> ModelConfig:
    """Read metadata of Llama's fields; families replace that by which they differ.

    `can_be_partial`: whether the family may rotate a part of each head. `truncates_yarn`: whether YaRN's range of
    frequencies ends at whole numbers, see `yarn_divisors`; files do not say so.

    Raises:
        ConfigurationError: an option is not supported.
        KeyError: a field is missing.
    """
    fields = own.everything
    hidden_size, query_heads = own["embedding_length"], own["attention.head_count"]
    head_dim = own.get("attention.key_length", hidden_size // query_heads)
    rotated = own.get("rope.dimension_count", head_dim)
    if rotated != head_dim and not can_be_partial:
        raise ConfigurationError("rope.dimension_count: partial rotary embedding is not supported in this architecture")
    eos = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    return ModelConfig(
        family="",  # `config_from_gguf` enters it
        vocabulary_size=own.get("vocab_size") or len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=own["feed_forward_length"],
        layers=own.layers,
        query_heads=query_heads,
        kv_heads=own.get("attention.head_count_kv", query_heads),
        head_dim=head_dim,
        max_context=own["context_length"],
        norm_epsilon=own["attention.layer_norm_rms_epsilon"],
        rotary=replace(
            _rotary(own, rotated, truncates_yarn=truncates_yarn), rotated=None if rotated == head_dim else rotated
        ),
        tied_embeddings="output.weight" not in own.tensors,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype="float16",
        windows=read_gguf_windows(own, 0),
        logits_softcap=own.get("final_logit_softcapping"),
    )


def read_gguf_windows(own: GgufFields, pattern: int) -> tuple[int | None, ...]:
    """Return the window of each layer; without a field that says which, every `pattern`th has none (0: all have)."""
    window, layers = own.get("attention.sliding_window", 0), own.layers
    if not window or window >= own["context_length"]:
        return ()
    stated = own.get("attention.sliding_window_pattern", pattern)
    if isinstance(stated, int):
        stated = [not stated or (i + 1) % stated != 0 for i in range(layers)]
    return tuple(int(window) if is_local else None for is_local in stated)


def read_gguf_moe(own: GgufFields) -> MoeConfig:
    """Return the experts of a model whose routing weights add up to one."""
    return MoeConfig(
        experts=own["expert_count"],
        experts_per_token=own["expert_used_count"],
        intermediate_size=own.get("expert_feed_forward_length") or own["feed_forward_length"],
        normalizes_routing_weights=True,
    )


def read_gguf_grouped_moe(own: GgufFields, scores: RouterScores) -> MoeConfig:
    """Return the experts of a model that has dense layers first, groups of experts and shared ones (DeepSeek, GLM).

    `scores`: how the router's logits become scores where files do not say so.
    """
    columns, gating = own["expert_feed_forward_length"], own.get("expert_gating_func")
    if gating is not None:
        if gating not in _SCORES:
            raise ConfigurationError(
                f"expert_gating_func: {gating} is not supported; supported: 1 (softmax), 2 (sigmoid)"
            )
        scores = _SCORES[gating]
    groups, shared = own.get("expert_group_count", 0), own.get("expert_shared_count", 0) * columns
    return replace(
        read_gguf_moe(own),
        normalizes_routing_weights=bool(own.get("expert_weights_norm", False)),
        dense_layers=tuple(range(own.get("leading_dense_block_count", 0))),
        scores=scores,
        has_correction=own.has_tensor("exp_probs_b.bias"),
        # Published models score groups by one expert where they use a softmax, and by two where a sigmoid.
        groups=ExpertGroups(groups, own["expert_group_used_count"], best=1 if scores is RouterScores.SOFTMAX else 2)
        if groups > 1
        else None,
        routing_scale=own.get("expert_weights_scale") or 1.0,
        routes_in_float32=True,
        shared=SharedExperts(shared) if shared else None,
    )


def _rotary(own: GgufFields, head_dim: int, *, truncates_yarn: bool) -> RotaryConfig:
    theta = own.get("rope.freq_base", 10000.0)
    match own.get("rope.scaling.type", "none"):
        case "none" | "longrope" if own.long_divisors:
            return RotaryConfig(
                theta, own.divisors, own.get("rope.scaling.attn_factor", 1.0), long_divisors=own.long_divisors,
                original_context=own["rope.scaling.original_context_length"],
            )  # fmt: skip
        case "none":
            return RotaryConfig(theta, own.divisors)
        case "linear":
            return RotaryConfig(theta, (float(own["rope.scaling.factor"]),) * (head_dim // 2))
        case "yarn":
            factor = float(own["rope.scaling.factor"])
            parameters = {
                "original_max_position_embeddings": own["rope.scaling.original_context_length"],
                "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
                "truncate": truncates_yarn,
            }
            amplitude = yarn_amplitude(factor) * own.get("rope.scaling.yarn_attn_factor", 1.0)
            return RotaryConfig(theta, yarn_divisors(theta, head_dim, factor, parameters), amplitude)
        case other:
            raise ConfigurationError(
                f"rope scaling {other!r} is not supported in GGUF files; supported: none, linear, yarn"
            )
