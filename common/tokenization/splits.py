"""Pre-tokenizers of byte-level vocabularies, by their names in GGUF files (`tokenizer.ggml.pre`).

The regular expressions are part of a model's definition: it was trained on text that was split in exactly this way.
They use the syntax of the `tokenizers` library (Oniguruma).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a family of models splits text, and other properties that its pre-tokenizer's name implies."""

    # None: the expression of GPT-2, which is built into `ByteLevel`.
    pattern: str | None = None
    # Split off each digit before all other splits.
    single_digits: bool = False
    # A piece that equals a token becomes this token, without merges.
    ignore_merges: bool = False
    # Whether BOS is added, if the file does not define it.
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """Return the pre-tokenizer of this rule."""
        if self.pattern is not None:
            split = Split(Regex(self.pattern), behavior="isolated")
            return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
        plain = ByteLevel(add_prefix_space=False, use_regex=True)
        return Sequence([Digits(individual_digits=True), plain]) if self.single_digits else plain


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters of one word: upper case followed by lower case, or only upper case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA_3 = SplitRule(
    rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ignore_merges=True,
    add_bos=True,
)
_QWEN_2 = SplitRule(rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}")
_TEKKEN = SplitRule(
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ignore_merges=True,
    add_bos=True,
)
_GPT_4O = SplitRule(
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_DIGITS_APART = SplitRule(single_digits=True)

SPLIT_RULES = MappingProxyType(
    {
        "gpt-2": SplitRule(),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_APART),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA_3),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_2),
        **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
        "tekken": _TEKKEN,
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
