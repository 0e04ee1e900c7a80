"""Which models are encoders: they embed texts, and generate none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# `model_type` of config.json.
ENCODER_FAMILIES = ("bert", "roberta", "xlm-roberta")


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an encoder of a family that is served."""
    return config.get("model_type") in ENCODER_FAMILIES


def first_position(config: Mapping[str, Any]) -> int:
    """Return the row of the position table that a text's first token gets: RoBERTa counts from behind the padding's."""
    if config.get("model_type") == "bert":
        return 0
    padding = config.get("pad_token_id")
    return (1 if padding is None else int(padding)) + 1


def encoder_context(config: Mapping[str, Any]) -> int:
    """Return how many tokens an encoder takes.

    Raises:
        KeyError: the config does not say.
    """
    return int(config["max_position_embeddings"]) - first_position(config)
