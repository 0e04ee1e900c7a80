"""Finds out which attention a model needs by tracing it on two tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from common.errors import ConfigurationError
from services.worker.engine.model.config import no_rotation

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig

# What models pass to attention beside queries, keys and values. The last three change what it computes, and are known
# here; of all others, those that are tensors (sinks, position biases) would have to be.
_HARMLESS = frozenset({"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "output_attentions"})
_KNOWN = frozenset({"scaling", "sliding_window", "softcap"})


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """One call of attention."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    cap: float | None


class Tracer:
    """Stands in for attention, and takes down who calls it and how."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.modules: list[torch.nn.Module] = []
        self.layers: list[LayerTrace] = []

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Answer a call as models make it, with zeros.

        Raises:
            ConfigurationError: it wants something that paged attention here has not.
        """
        if attention_mask is not None:
            raise ConfigurationError("it adds a mask of its own to attention scores")
        if key.shape[-1] != query.shape[-1] or value.shape[-1] != query.shape[-1]:
            raise ConfigurationError("its queries, keys and values differ in width")
        if getattr(module, "is_causal", True) is False:
            raise ConfigurationError("its attention looks ahead")
        foreign = [
            name for name, option in options.items() if name not in _HARMLESS | _KNOWN and torch.is_tensor(option)
        ]
        if foreign:
            raise ConfigurationError(f"its attention takes {', '.join(foreign)}, which is not supported")
        scale = options.get("scaling")
        self.modules.append(module)
        self.layers.append(
            LayerTrace(
                query_heads=query.shape[1],
                kv_heads=key.shape[1],
                head_dim=query.shape[-1],
                scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                window=options.get("sliding_window"),
                cap=options.get("softcap"),
            )
        )
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def trace(decoder: torch.nn.Module, tracer: Tracer, config: ModelConfig, device: torch.device) -> ModelConfig:
    """Run `decoder`, whose attention `tracer` is, and complete `config` by what that saw.

    Raises:
        ConfigurationError: the family cannot be run here; the message says why.
    """
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise _refusal(config, "it takes no position_ids")
    places = torch.arange(2, device=device)[None]
    try:
        decoder(input_ids=places, position_ids=places, use_cache=False)
    except ConfigurationError as error:
        raise _refusal(config, str(error)) from error
    except KeyError as error:
        raise _refusal(config, "its attention cannot be replaced") from error
    layers = tracer.layers
    if len(layers) != config.layers or len(set(tracer.modules)) != len(layers):
        raise _refusal(config, f"{len(layers)} of its {config.layers} layers attend in a way that can be replaced")
    first, kv_heads = layers[0], max(layer.kv_heads for layer in layers)
    if len({(layer.query_heads, layer.cap) for layer in layers}) > 1:
        raise _refusal(config, "its layers differ in query heads or caps")
    if any(kv_heads % layer.kv_heads for layer in layers):
        raise _refusal(config, "its layers differ in KV heads, and their numbers are no multiples of each other")
    windows, head_dim = tuple(layer.window for layer in layers), max(layer.head_dim for layer in layers)
    return replace(
        config,
        query_heads=first.query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=no_rotation(head_dim),
        attention_scale=first.scale,
        attention_softcap=first.cap,
        windows=() if not any(windows) else windows,
    )


def _refusal(config: ModelConfig, reason: str) -> ConfigurationError:
    return ConfigurationError(f"model family {config.family!r} cannot be served through transformers: {reason}")
