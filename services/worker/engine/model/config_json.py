"""The shape of a decoder from its config.json."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from common.encoders import is_encoder
from common.errors import ConfigurationError
from common.heads import read_head
from services.worker.engine.families.registry import aliased_families, families_by_name, wrapped_families
from services.worker.engine.model.json_fields import check_sizes, token_ids
from services.worker.engine.quantization.checkpoint_scheme import stored_format

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from services.worker.engine.model.config import ModelConfig


# Checkpoints of a decoder, `text_config`, beside encoders of images or sound, whose outputs it takes as if they were
# tokens: alone it is what it is elsewhere.
_CONTAINERS = frozenset({
    "aya_vision", "cohere2_vision", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3",
    "qwen2_audio", "smolvlm", "vipllava", "voxtral",
})  # fmt: skip
_OUTER = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


def config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a `config.json` as `transformers` writes it, versions 4 and 5, and its `generation_config.json`.

    Raises:
        ConfigurationError: the family or one of its options is not supported, or a field is missing or malformed.
    """
    with _named_flaws():
        return _read(config, generation or {})


@contextmanager
def _named_flaws() -> Iterator[None]:
    """Turn what readers raise on a malformed file into a ConfigurationError."""
    try:
        yield
    except KeyError as error:
        raise ConfigurationError(f"config.json has no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigurationError(f"config.json has a value of an unexpected type or range: {error}") from error


def _read(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    text = _text_part(config)
    name = text.get("model_type", config.get("model_type"))
    family = families_by_name().get(str(name))
    if family is None:
        raise ConfigurationError(f"model family {name!r} is not supported; supported: {', '.join(families_by_name())}")
    quantization = config.get("quantization_config") or text.get("quantization_config")
    stored = stored_format(quantization) if quantization else None
    family.check_stored(stored)
    text = family.with_defaults(text)
    check_sizes(text)
    read = family.read(text)
    stated = token_ids(generation.get("eos_token_id", text.get("eos_token_id")))
    ends = dict.fromkeys(stated + tuple(end for end in family.ends if end < read.vocabulary_size))
    head = read_head(config)
    labels = len(head.labels) if head else 0
    return replace(
        read,
        family=family.name,
        eos_token_ids=tuple(ends),
        overflows_float16=family.overflows_float16,
        stored_format=stored,
        labels=labels,
    )


class Implementation(Enum):
    """The code that computes a model."""

    ENCODER = "encoder"
    OWN = "own"
    """A decoder of one of the `families`."""
    TRANSFORMERS = "transformers"


def implementation_of(config: Mapping[str, Any]) -> Implementation:
    """Return which code would compute the model of a config.json; it may still refuse one of the model's options.

    Raises:
        ConfigurationError: a field that decides it is malformed.
    """
    with _named_flaws():
        if is_encoder(config):
            return Implementation.ENCODER
        text = _text_part(config)
        family = families_by_name().get(str(text.get("model_type")))
        is_own = family is not None and family.covers(family.with_defaults(text))
        return Implementation.OWN if is_own else Implementation.TRANSFORMERS


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(config.get("model_type"))
    if name in aliased_families():
        return {**config, "model_type": aliased_families()[name].name}
    outer = {key: config[key] for key in _OUTER if key in config}
    text = config.get("text_config") or {}
    family = wrapped_families().get(name)
    if family is not None:
        # Older files have the fields of the text model beside the others.
        return {**outer, **(text or config), "model_type": family.name}
    return {**outer, **text} if name in _CONTAINERS and text.get("model_type") in families_by_name() else config
