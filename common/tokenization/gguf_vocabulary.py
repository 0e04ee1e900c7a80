"""Construction of a tokenizer from the vocabulary in a GGUF file.

GGUF files have tokens, merges or scores, token types, and the name of the pre-tokenizer; normalizer, pre-tokenizer
and decoder follow from these by convention and are rebuilt here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.processors import TemplateProcessing

from common.errors import ConfigurationError
from common.tokenization.vocabulary import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tokenizers.pre_tokenizers import PreTokenizer

    from common.gguf_header import Metadata

# Values of `tokenizer.ggml.token_type`, as defined by llama.cpp.
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

SPECIAL_TOKEN_KEYS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def build_tokenizer(path: Path, metadata: Metadata) -> Tokenizer:
    """Return the tokenizer that the GGUF file at `path` describes.

    Raises:
        ConfigurationError: the vocabulary is missing, or of a kind that cannot be rebuilt exactly.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigurationError(f"{path}: the file has no vocabulary")
    kind = metadata.get("tokenizer.ggml.model")
    match kind:
        case "gpt2":
            rule = find_split_rule(str(metadata.get("tokenizer.ggml.pre", "gpt-2")))
            tokenizer = _byte_level(tokens, _types(metadata), _strings(metadata, "tokenizer.ggml.merges"), rule)
            add_bos = rule.add_bos
        case "llama":
            tokenizer = _sentence_piece(path, tokens, metadata)
            add_bos = True
        case _:
            raise ConfigurationError(
                f"{path}: vocabularies of kind {kind!r} are not supported in GGUF files (known: gpt2, llama). "
                "Serve the model from a directory with tokenizer.json instead"
            )
    _add_whole_tokens(tokenizer, tokens, _types(metadata))
    special = special_tokens(metadata)
    _set_framing(
        tokenizer,
        special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return tokenizer


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the file's special tokens by their variable names in chat templates."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    ids = {name: metadata.get(key) for name, key in SPECIAL_TOKEN_KEYS.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _byte_level(tokens: Sequence[str], types: Sequence[int], merges: Iterable[str], rule: SplitRule) -> Tokenizer:
    alphabet = byte_alphabet()
    letters = frozenset(alphabet.values())
    whole = {_CONTROL, _USER_DEFINED}
    vocabulary = {
        # Some converters write ordinary tokens in plain text; control and user-defined tokens are matched literally.
        token if types[i] in whole or letters.issuperset(token) else "".join(alphabet[b] for b in token.encode()): i
        for i, token in enumerate(tokens)
    }
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule.ignore_merges))
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(path: Path, tokens: Sequence[str], metadata: Metadata) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(tokens):
        raise ConfigurationError(f"{path}: the vocabulary has no scores, which determine the order of merges")
    if str(metadata.get("general.architecture")).startswith("gemma"):
        raise ConfigurationError(f"{path}: Gemma's vocabulary is not supported in GGUF files")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges_by_score(vocabulary, [float(score) for score in scores])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if has_prefix else "never", split=False)
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if has_prefix else decoding)
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that merge into a token, best-scored result first, which is sentencepiece's order."""
    ranked = []
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[i], -len(left), -len(right), vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make the tokenizer match control and user-defined tokens before it splits the text."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    user_defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _strings(metadata: Metadata, key: str) -> tuple[str, ...]:
    value = metadata.get(key, ())
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


def _types(metadata: Metadata) -> list[int]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    value = metadata.get("tokenizer.ggml.token_type", ())
    types = [int(kind) for kind in value] if isinstance(value, tuple) else []
    return types if len(types) == len(tokens) else [1] * len(tokens)


def _set_framing(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode(add_special_tokens=True)` prepend `bos` and append `eos`, unless they are None."""
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Properties that the name of a pre-tokenizer implies, such as how it splits text."""

    # Each one divides what those before it have left whole. Empty: the expression of GPT-2, which is built into
    # `ByteLevel`.
    patterns: tuple[str, ...] = ()
    # Split off each digit before all other splits.
    single_digits: bool = False
    # A piece that equals a token becomes this token, without merges.
    ignore_merges: bool = False
    # Whether BOS is added, if the file does not define it.
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """Return the pre-tokenizer of this rule."""
        if self.patterns:
            splits = [Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
            return pre_tokenizers.Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
        plain = ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([Digits(individual_digits=True), plain]) if self.single_digits else plain


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters of one word: upper case followed by lower case, or only upper case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA_3 = SplitRule(
    (rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    ignore_merges=True,
    add_bos=True,
)
# Llama 3's tokenizer without a token in front of texts: Smaug, SmolLM3.
_SMAUG = SplitRule(_LLAMA_3.patterns, ignore_merges=True)
_GLM_4 = SplitRule(_LLAMA_3.patterns)
_DEEPSEEK_3 = SplitRule(
    (
        r"\p{N}{1,3}",
        # Chinese characters, Hiragana and Katakana.
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    ),
    add_bos=True,
)
_QWEN_2 = SplitRule((rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",))
_TEKKEN = SplitRule(
    (rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",),
    ignore_merges=True,
    add_bos=True,
)
_GPT_4O = SplitRule(
    (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ),
)
_DIGITS_APART = SplitRule(single_digits=True)

SPLIT_RULES = MappingProxyType(
    {
        "gpt-2": SplitRule(),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_APART),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA_3),
        "smaug-bpe": _SMAUG,
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_2),
        **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
        "tekken": _TEKKEN,
        **dict.fromkeys(("glm4", "chatglm-bpe"), _GLM_4),
        "deepseek-v3": _DEEPSEEK_3,
    }
)


def find_split_rule(name: str) -> SplitRule:
    """Return the rule that a GGUF file calls `name`.

    Raises:
        ConfigurationError: the name is unknown; a wrong guess would silently split text differently than in training.
    """
    rule = SPLIT_RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(SPLIT_RULES))
        raise ConfigurationError(
            f"unknown pre-tokenizer {name!r} in the GGUF file (known: {known}). "
            "Serve the model from a directory with tokenizer.json instead"
        )
    return rule
