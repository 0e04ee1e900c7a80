"""Rotary embeddings that are stretched beyond what a config.json says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    JsonConfig = Mapping[str, Any]  # free JSON; values are checked where they are read


def with_rope_parameters(config: JsonConfig, parameters: JsonConfig) -> dict[str, Any]:
    """Return `config` with `parameters` in place of its own of the same names, and the context length that they give.

    That is `original_max_position_embeddings`, by default the config's context length, times `factor`.

    Raises:
        ConfigurationError: the parameters are incomplete, or cannot be those of this model.
    """
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return {**config, "text_config": with_rope_parameters(inner, parameters)}
    kind, factor = parameters.get("rope_type", parameters.get("type")), parameters.get("factor")
    if not isinstance(kind, str):
        raise ConfigurationError("model.rope_parameters has no rope_type, such as yarn or llama3")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise ConfigurationError(f"model.rope_parameters: factor has to be a number of at least 1, not {factor!r}")
    own = config.get("rope_parameters") or {}
    if any(isinstance(each, dict) for each in own.values()):
        raise ConfigurationError("model.rope_parameters: kinds of layers that have their own are not supported")
    context = parameters.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if not isinstance(context, int):
        raise ConfigurationError("model.rope_parameters has no original_max_position_embeddings, nor has config.json")
    kept = {"rope_theta": own["rope_theta"]} if "rope_theta" in own else {}
    if "partial_rotary_factor" in own:
        kept["partial_rotary_factor"] = own["partial_rotary_factor"]
    stretched = {**kept, "original_max_position_embeddings": context, **parameters, "rope_type": kind}
    return {
        **{key: value for key, value in config.items() if key != "rope_scaling"},
        "rope_parameters": stretched,
        "max_position_embeddings": int(context * factor),
    }
