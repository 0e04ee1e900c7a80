"""The bundled model's tokenizer as `transformers` reads it, to compare with."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from common.models import resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class OracleTokenizer(Protocol):
    """The part of a `transformers` tokenizer that tests use; it is untyped."""

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str]

    def __call__(self, text: str, add_special_tokens: bool = ...) -> dict[str, list[int]]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: object, **options: object) -> Any: ...


@cache
def load_bundled() -> OracleTokenizer:
    """Load the bundled model's tokenizer, with the pre-tokenizer that the conversion to GGUF forgets put back."""
    path = resolve_model("smollm2-135m-instruct").path
    tokenizer: OracleTokenizer = _load(str(path.parent), gguf_file=path.name)
    digits = Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])
    return tokenizer


def load_directory(path: str) -> OracleTokenizer:
    """Load a tokenizer from a directory, or from a GGUF file."""
    tokenizer: OracleTokenizer = _load(path)
    return tokenizer


def load_gguf(directory: str, name: str) -> OracleTokenizer:
    """Load a tokenizer from a GGUF file."""
    tokenizer: OracleTokenizer = _load(directory, gguf_file=name)
    return tokenizer


def _load(directory: str, **options: str) -> Any:  # transformers is not typed
    # Only now: whoever collects tests would wait for it.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, **options)
