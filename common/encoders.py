"""Detection of encoder models, which embed text and do not generate it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# `model_type` of config.json.
ENCODER_FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert")


def is_encoder_directory(path: Path) -> bool:
    """Whether a model directory holds an encoder; False if its config.json cannot be read."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and is_encoder(config)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an encoder of a supported family."""
    return config.get("model_type") in ENCODER_FAMILIES


def first_position(config: Mapping[str, Any]) -> int:
    """Return the position id of a text's first token: RoBERTa's positions start after the padding token's id."""
    if config.get("model_type") in ("bert", "modernbert"):
        return 0
    padding = config.get("pad_token_id")
    return (1 if padding is None else int(padding)) + 1


def encoder_context(config: Mapping[str, Any]) -> int:
    """Return the longest input of an encoder, in tokens.

    Raises:
        KeyError: the config has no `max_position_embeddings`.
    """
    return int(config["max_position_embeddings"]) - first_position(config)
