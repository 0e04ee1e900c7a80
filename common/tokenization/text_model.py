"""The tokenizer, chat templates, special tokens and limits of one model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tokenizers.models import BPE, Unigram

from common.errors import ConfigurationError
from common.gguf_header import Metadata, read_header
from common.heads import read_head
from common.models import ModelFiles, ModelKind, resolve_model
from common.models.rope import with_rope_parameters
from common.tokenization.directory import context_length, embedding_traits, read_directory, read_json, read_placeholder
from common.tokenization.gguf_vocabulary import build_tokenizer, special_tokens
from common.tokenization.parts import NO_TRAITS, EmbeddingTraits, PairStyle, TextParts
from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tokenizers import Tokenizer

    from common.settings import ModelSettings


# GGUF's numbers of the poolings that decoder models use.
_GGUF_POOLINGS: Final = {1: Pooling.MEAN, 3: Pooling.LAST}


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's tokenizer and chat templates, and the limits that requests are checked against."""

    tokenizer: Tokenizer
    # Jinja source by name: `default`, and `tool_use` if the model has a separate one for requests with tools.
    chat_templates: Mapping[str, str]
    # bos_token, eos_token, …: variables of chat templates.
    special_tokens: Mapping[str, str]
    # Tokens of prompt and output together.
    max_context_tokens: int
    # Rows of the embedding: ids are in [0, vocabulary_size). Some ids may have no text.
    vocabulary_size: int
    embedding: EmbeddingTraits = NO_TRAITS


def load_served_model(settings: ModelSettings) -> TextModel:
    """Load the `TextModel` for the model settings; a placeholder if weights are random and there is no tokenizer.

    Raises:
        ConfigurationError: the model cannot be found or read, or the pooling does not suit it.
    """
    placeholder = settings.load_format in ("dummy", "fake")
    files = resolve_model(settings.reference, weights=False)
    model = load_text_model(
        files, max_context=settings.max_context, placeholder=placeholder, rope_parameters=settings.rope_parameters
    )
    model = replace(model, embedding=with_settings(model.embedding, settings))
    if settings.pooling == "auto":
        return model
    pooling = Pooling(settings.pooling)
    if pooling is Pooling.FIRST and not model.embedding.is_encoder:
        raise ConfigurationError(
            "model.pooling=cls is only for encoders: in other models the first token does not attend to later ones"
        )
    return replace(model, embedding=replace(model.embedding, pooling=pooling))


def served_traits(settings: ModelSettings) -> EmbeddingTraits:
    """Return the embedding traits of the model in the settings, without loading its vocabulary.

    Raises:
        ConfigurationError: the model cannot be found or read.
    """
    files = resolve_model(settings.reference, weights=False)
    is_directory = files.kind is ModelKind.DIRECTORY
    traits = embedding_traits(files.path, read_json(files.path / "config.json")) if is_directory else NO_TRAITS
    return with_settings(traits, settings)


def with_settings(traits: EmbeddingTraits, settings: ModelSettings) -> EmbeddingTraits:
    """Return the traits with the head and the notation of pairs that the settings state."""
    if settings.classifier_from_token:
        if traits.is_encoder:
            raise ConfigurationError("model.classifier_from_token is for models that generate, and this is an encoder")
        head = read_head({}, settings.classifier_from_token)
        traits = replace(traits, head=head, pair_style=PairStyle.QWEN3_RERANKER)
    if settings.pair_style != "auto":
        traits = replace(traits, pair_style=PairStyle(settings.pair_style))
    return traits


def load_text_model(
    files: ModelFiles,
    *,
    max_context: int = 0,
    placeholder: bool = False,
    rope_parameters: Mapping[str, Any] | None = None,
) -> TextModel:
    """Load the `TextModel` of a model's files.

    Args:
        files: the model's files.
        max_context: upper bound on the model's own context length, in tokens; 0 for none.
        placeholder: use a placeholder tokenizer if the directory has none (for models with random weights).
        rope_parameters: rotary embedding in place of that of config.json, which determines the context length.

    Raises:
        ConfigurationError: a file is missing, damaged, or of a kind that is not supported.
    """
    has_vocabulary = (files.path / "tokenizer.json").is_file()
    match files.kind:
        case ModelKind.GGUF:
            parts = _read_gguf(files.path)
        case ModelKind.DIRECTORY if placeholder and not has_vocabulary:
            parts = read_placeholder(files.path)
        case ModelKind.DIRECTORY:
            parts = read_directory(files.path)
    parts.tokenizer.no_truncation()
    parts.tokenizer.no_padding()
    disable_word_cache(parts.tokenizer)
    own = parts.max_context_tokens
    if rope_parameters and files.kind is ModelKind.DIRECTORY:
        own = context_length(with_rope_parameters(read_json(files.path / "config.json"), rope_parameters))
    if own is None and not max_context:
        raise ConfigurationError(f"{files.path}: the model's files have no context length; set model.max_context")
    return TextModel(
        tokenizer=parts.tokenizer,
        chat_templates=parts.chat_templates,
        special_tokens=parts.special_tokens,
        max_context_tokens=min(limit for limit in (own, max_context) if limit),
        vocabulary_size=parts.vocabulary_size or parts.tokenizer.get_vocab_size(),
        embedding=parts.embedding,
    )


def disable_word_cache(tokenizer: Tokenizer) -> None:
    """Disable the tokenizer's cache of words.

    The library caches the tokens of the first 10,000 words over all requests, so the time to encode a rare word would
    reveal whether another user has sent it before.
    """
    model = tokenizer.model
    if isinstance(model, BPE | Unigram):  # other models have no cache
        model._resize_cache(0)
        model._clear_cache()


def _read_gguf(path: Path) -> TextParts:
    metadata = read_header(path).metadata
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": str(source)
        for key, source in metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    return TextParts(
        tokenizer=build_tokenizer(path, metadata),
        chat_templates=templates,
        special_tokens=special_tokens(metadata),
        max_context_tokens=_architecture_number(metadata, "context_length"),
        vocabulary_size=_architecture_number(metadata, "vocab_size") or 0,
        embedding=EmbeddingTraits(
            pooling=_GGUF_POOLINGS.get(_architecture_number(metadata, "pooling_type") or 0, Pooling.LAST),
            dimensions=_architecture_number(metadata, "embedding_length") or 0,
        ),
    )


def _architecture_number(metadata: Metadata, name: str) -> int | None:
    value = metadata.get(f"{metadata.get('general.architecture')}.{name}")
    return value if isinstance(value, int) else None
