"""A placeholder tokenizer for models with random weights, whose directories often have no tokenizer.

Text is encoded byte by byte; each id above 255 decodes to a distinct word, so that every token of a load test is
visible in the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.tokenization.byte_alphabet import byte_alphabet
from common.tokenization.directory import context_length, embedding_traits, read_json, vocabulary_size
from common.tokenization.parts import TextParts

if TYPE_CHECKING:
    from pathlib import Path

_DEFAULT_VOCABULARY: Final = 32_000
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


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
