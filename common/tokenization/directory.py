"""Readers of model directories in the layout of `transformers`.

The tokenizer is in tokenizer.json and its accompanying JSON files; the files of sentence-transformers define
embeddings. Models with random weights, whose directories often have no tokenizer, get a placeholder.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from common.encoders import encoder_context, is_encoder
from common.errors import ConfigurationError
from common.heads import has_pooling_module, only_embeds, read_head
from common.tokenization.parts import EmbeddingTraits, PairStyle, TextParts
from common.tokenization.vocabulary import byte_alphabet
from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# Any: free JSON; values are checked where they are read.
JsonObject = dict[str, Any]

# For families whose config.json omits values that equal the defaults of `transformers`.
_UNSTATED_CONTEXTS: Final = {"gemma3": 131_072, "gemma3_text": 131_072, "gemma4": 131_072, "gemma4_text": 131_072}
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# Supported flags of a pooling module's config.json.
_POOLINGS: Final = {
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_MODULES: Final = ("Transformer", "Pooling", "Normalize")
_DEFAULT_VOCABULARY: Final = 32_000
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def read_directory(path: Path) -> TextParts:
    """Read vocabulary, templates and limits from `path`.

    Raises:
        ConfigurationError: tokenizer.json is missing, or a file is damaged.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(f"{path}: no tokenizer.json (convert other formats with transformers first)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigurationError(f"{file}: {error}") from error
    settings = read_json(path / "tokenizer_config.json")
    # Models from before 2024 list their special tokens in this file.
    named = _named_tokens(read_json(path / "special_tokens_map.json") | settings)
    _add_missing(tokenizer, settings, named.values())
    config = read_json(path / "config.json")
    if settings.get("add_eos_token") and read_pooling(path) is not None:
        _end_texts(tokenizer, named.get("eos_token"))
    return TextParts(
        tokenizer, _templates(path, settings), named, _longest_text(path, config), vocabulary_size(config),
        embedding_traits(path, config),
    )  # fmt: skip


def read_json(path: Path) -> JsonObject:
    """Return the object in the JSON file at `path`, or an empty one if there is no such file.

    Raises:
        ConfigurationError: the file is not valid JSON, or not an object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: a JSON object is expected")
    return value


def context_length(config: JsonObject) -> int | None:
    """Return the context length from a config.json, or else its family's default; None if there is neither."""
    for source in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    return _UNSTATED_CONTEXTS.get(str(config.get("model_type")))


def embedding_traits(path: Path, config: JsonObject) -> EmbeddingTraits:
    """Return whether the model in `path` is an encoder, and its pooling and embedding width.

    Raises:
        ConfigurationError: its pooling is not supported.
    """
    encodes = is_encoder(config)
    pooling = read_pooling(path) or (Pooling.MEAN if encodes else Pooling.LAST)
    width = config.get("hidden_size") or (config.get("text_config") or {}).get("hidden_size") or 0
    head = read_head(config)
    is_qwen3 = str(config.get("model_type")).startswith("qwen3")
    is_reranker = is_qwen3 and head is not None and head.scores_pairs
    prompts, default = read_prompts(path)
    return EmbeddingTraits(
        encodes,
        pooling,
        int(width),
        only_embeds=not encodes and only_embeds(config, has_pooling=has_pooling_module(path)),
        head=head,
        pair_style=PairStyle.QWEN3_RERANKER if is_reranker else PairStyle.TOKENIZER,
        prompts=prompts,
        default_prompt=default,
    )


def read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of sentence-transformers by name, and the name of the one for texts without a prompt.

    Raises:
        ConfigurationError: the file is damaged.
    """
    stated = read_json(path / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (stated.get("prompts") or {}).items()}
    default = stated.get("default_prompt_name")
    if default is not None and default not in prompts:
        file = path / "config_sentence_transformers.json"
        raise ConfigurationError(f"{file}: default_prompt_name {default!r} is none of its prompts")
    return prompts, default


def _longest_text(path: Path, config: JsonObject) -> int | None:
    if not is_encoder(config):
        return context_length(config)
    limits = (encoder_context(config) if context_length(config) else None, read_longest_text(path))
    return min((limit for limit in limits if limit), default=None)


def vocabulary_size(config: JsonObject) -> int:
    """Return the number of embedding rows from a config.json, 0 if it has none."""
    return int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0)


def _named_tokens(settings: JsonObject) -> dict[str, str]:
    """Return the text of bos_token, eos_token etc. by name; files store each token as a string or an object."""
    named = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _add_missing(tokenizer: Tokenizer, settings: JsonObject, named: Iterable[str]) -> None:
    """Add the tokens that only tokenizer_config.json lists, in the order of their ids; named ones are special."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    entries = sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda entry: int(entry[0]))
    tokenizer.add_tokens([_added_token(entry) for _, entry in entries if entry["content"] not in known])
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    wanted = [AddedToken(token, normalized=False, special=True) for token in named if token not in special]
    tokenizer.add_special_tokens(wanted)


def _end_texts(tokenizer: Tokenizer, end: str | None) -> None:
    """Make the tokenizer append the end of sequence to texts, unless it does: embeddings are those of this token."""
    end_id = None if end is None else tokenizer.token_to_id(end)
    if end is None or end_id is None or tokenizer.encode("").ids[-1:] == [end_id]:
        return
    # Post-processors cannot be combined, so this one also adds what the former one does.
    plain, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    before, after = whole[:at], [*whole[at + len(plain) :], end_id]
    names = {token_id: str(tokenizer.id_to_token(token_id)) for token_id in (*before, *after)}
    start, stop = (" ".join(names[token_id] for token_id in part) for part in (before, after))
    second = " ".join(f"{names[token_id]}:1" for token_id in after)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {stop}".strip(),
        pair=f"{start} $A {stop} $B:1 {second}".strip(),
        special_tokens=[(name, token_id) for token_id, name in names.items()],
    )


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
    return AddedToken(entry["content"], normalized=bool(entry.get("normalized", not flags["special"])), **flags)


def _templates(path: Path, settings: JsonObject) -> dict[str, str]:
    """Return the chat templates by name; files take precedence over entries of tokenizer_config.json."""
    stated = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        templates |= {str(entry["name"]): str(entry["template"]) for entry in stated}
    file = path / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates


def read_pooling(path: Path) -> Pooling | None:
    """Return the pooling of the model in directory `path`; None if the files define none.

    Raises:
        ConfigurationError: the files define modules or poolings that are not supported.
    """
    file = path / "modules.json"
    if not file.is_file():
        return None
    modules = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in _required_json(file)}
    unknown = [name for name in modules if name not in _MODULES]
    if unknown:
        raise ConfigurationError(f"{file}: {', '.join(unknown)} after the model is not supported; {_MODULES} are")
    if "Pooling" not in modules:
        return None
    chosen = _required_json(path / modules["Pooling"] / "config.json")
    modes = [name for name, value in chosen.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigurationError(f"{file}: {', '.join(modes) or 'no pooling'} is not supported; one of these is: "
                                 f"{', '.join(_POOLINGS)}")  # fmt: skip
    return _POOLINGS[modes[0]]


def read_longest_text(path: Path) -> int | None:
    """Return the longest text, in tokens with special ones, that the model supports; None if the files set no limit."""
    file = path / "sentence_bert_config.json"
    longest = _required_json(file).get("max_seq_length") if file.is_file() else None
    return longest if isinstance(longest, int) else None


def _required_json(file: Path) -> Any:  # free JSON
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}") from error


def read_placeholder(path: Path) -> TextParts:
    """Return a placeholder with the vocabulary size and context length of the config.json in `path`."""
    config = read_json(path / "config.json")
    size = vocabulary_size(config) or _DEFAULT_VOCABULARY
    vocabulary = {letter: byte for byte, letter in byte_alphabet().items() if byte < size}
    # Ġ is the space of the byte alphabet.
    vocabulary |= {f"Ġw{i}": i for i in range(256, size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return TextParts(
        tokenizer, {"default": _TEMPLATE}, {}, context_length(config), size, embedding_traits(path, config)
    )
