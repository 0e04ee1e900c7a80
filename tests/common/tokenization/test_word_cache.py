"""No word leaves a trace in the tokenizer, as its time to encode would show that somebody has sent it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from common.models import resolve_model
from common.tokenization import load_text_model
from common.tokenization.text_model import disable_word_cache

if TYPE_CHECKING:
    from collections.abc import Callable

WORD = "qxzvkjwpbfgh" * 20


def keeps(tokenizer: Tokenizer, word: str) -> bool:
    """Return whether the model remembers a word: it then gives the same ids when its rules have changed."""
    before = tokenizer.encode(word, add_special_tokens=False).ids
    model = tokenizer.model
    assert isinstance(model, BPE)
    # No entry of the vocabulary begins with it, so no word of several characters can be built.
    model.continuing_subword_prefix = "\x00"
    after = tokenizer.encode(word, add_special_tokens=False).ids
    model.continuing_subword_prefix = None
    return after == before


@pytest.fixture
def copy() -> Callable[[], Tokenizer]:
    text = load_text_model(resolve_model("smollm2-135m-instruct")).tokenizer.to_str()
    return lambda: Tokenizer.from_str(text)


@pytest.mark.parametrize("word", [WORD, "quixotically", "unlikelihoods"])
def test_a_loaded_model_remembers_no_word(word: str) -> None:
    assert not keeps(load_text_model(resolve_model("smollm2-135m-instruct")).tokenizer, word)


def test_the_library_caches_words_by_default(copy: Callable[[], Tokenizer]) -> None:
    assert keeps(copy(), WORD)


def test_words_remembered_before_are_forgotten(copy: Callable[[], Tokenizer]) -> None:
    tokenizer = copy()
    before = tokenizer.encode(WORD).ids
    disable_word_cache(tokenizer)
    assert tokenizer.encode(WORD).ids == before
    assert not keeps(tokenizer, WORD)
