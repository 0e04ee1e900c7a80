from __future__ import annotations

import codecs
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.models import resolve_model
from common.tokenization import TextModel, load_text_model
from common.tokenization.vocabulary import Pieces, read_vocabulary
from services.detokenizer import decoding
from services.detokenizer.decoding import ByteDecoder, IncrementalDecoder, WindowDecoder
from tests.examples import examples
from tests.services.detokenizer.vocabularies import sentence_piece, word_piece
from tests.texts import TEXTS

MODEL = load_text_model(resolve_model("smollm2-135m-instruct"))
VOCABULARY = read_vocabulary(MODEL.tokenizer, MODEL.vocabulary_size)
# Ids whose bytes are no whole characters: where decoding is hard.
PARTIAL = [i for i, text in enumerate(VOCABULARY.all_pieces.texts) if text is None]
SENTENCE_PIECE = sentence_piece()
BYTES_START, BYTES_END = 3, 259

any_id = st.one_of(
    st.integers(0, MODEL.vocabulary_size + 10), st.sampled_from(PARTIAL), st.sampled_from(PARTIAL), st.integers(0, 16)
)


def pushed(decoder: IncrementalDecoder, ids: list[int]) -> list[str]:
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@examples(150)
@given(ids=st.lists(any_id, max_size=60), skip=st.booleans())
def test_incremental_text_is_that_of_decoding_all_at_once(ids: list[int], skip: bool) -> None:
    parts = pushed(ByteDecoder(VOCABULARY.pieces(skip_special_tokens=skip)), ids)
    assert "".join(parts) == MODEL.tokenizer.decode(ids, skip_special_tokens=skip)


@examples(100)
@given(ids=st.lists(any_id, min_size=1, max_size=60))
def test_decoded_text_is_never_retracted(ids: list[int]) -> None:
    decoder, text = ByteDecoder(VOCABULARY.all_pieces), ""
    for count, i in enumerate(ids, start=1):
        text += decoder.push(i)
        whole = MODEL.tokenizer.decode(ids[:count], skip_special_tokens=False)
        assert whole.startswith(text)
        # Only the start of one character is held back, which shows as at most three replacement characters.
        assert len(whole) - len(text) <= 3
        assert set(whole[len(text) :]) <= {"\ufffd"}


@examples(100)
# The bundled vocabulary lacks a few control characters and the bytes of the planes that hold no letters.
@given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"]), max_size=80))
def test_no_replacement_character_appears_that_the_text_lacks(text: str) -> None:
    ids = MODEL.tokenizer.encode(text, add_special_tokens=False).ids
    parts = pushed(ByteDecoder(VOCABULARY.all_pieces), ids)
    assert "".join(parts) == text
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_whole(text: str) -> None:
    ids = MODEL.tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pushed(ByteDecoder(VOCABULARY.all_pieces), ids)) == text


def test_a_character_appears_with_its_last_byte() -> None:
    ids = [list(VOCABULARY.all_pieces.data).index(bytes([byte])) for byte in "漢".encode()]
    assert pushed(ByteDecoder(VOCABULARY.all_pieces), ids) == ["", "", "漢", ""]


def test_half_a_character_at_the_end_shows_as_one_replacement_character() -> None:
    ids = [list(VOCABULARY.all_pieces.data).index(bytes([byte])) for byte in "漢".encode()[:2]]
    assert pushed(ByteDecoder(VOCABULARY.all_pieces), ids) == ["", "", "\ufffd"]


@examples(100)
@given(
    parts=st.lists(
        st.one_of(
            st.integers(BYTES_END, SENTENCE_PIECE.get_vocab_size() - 1).map(lambda i: [i]),
            st.text(max_size=5).map(lambda text: [BYTES_START + byte for byte in text.encode()]),
        ),
        max_size=20,
    )
)
def test_byte_fallback_vocabularies_decode_as_a_continuation_does(parts: list[list[int]]) -> None:
    ids = [i for part in parts for i in part]
    anchor = SENTENCE_PIECE.get_vocab()["."]
    vocabulary = read_vocabulary(SENTENCE_PIECE, 0)
    whole = SENTENCE_PIECE.decode([anchor, *ids], skip_special_tokens=False)
    assert "." + "".join(pushed(ByteDecoder(vocabulary.all_pieces), ids)) == whole


@examples(100)
@given(ids=st.lists(st.integers(0, 11), max_size=40), skip=st.booleans())
def test_other_decoders_are_followed_through_a_window(ids: list[int], skip: bool) -> None:
    tokenizer = word_piece()
    text = "".join(pushed(WindowDecoder(tokenizer, skip_special_tokens=skip), ids))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


class CountingCodecs:
    """The codec module, counting the bytes that are decoded."""

    def __init__(self) -> None:
        self.decoded_bytes = 0

    def utf_8_decode(self, data: bytes, errors: str, final: bool) -> tuple[str, int]:
        self.decoded_bytes += len(data)
        return codecs.utf_8_decode(data, errors, final)


@pytest.mark.parametrize("byte", [0x80, 0xC3, 0xE6, 0xF0, 0xFF])
def test_effort_is_linear_on_endless_invalid_bytes(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    counting = CountingCodecs()
    monkeypatch.setattr(decoding, "codecs", counting)
    decoder = ByteDecoder(Pieces([bytes([byte])], [None]))
    text = "".join(pushed(decoder, [0] * 10_000))
    assert text == "\ufffd" * 10_000
    assert counting.decoded_bytes <= 4 * 10_001


def test_effort_of_the_window_is_linear_on_tokens_without_text() -> None:
    decoded = []

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        decoded.append(len(ids))
        return ""

    decoder = WindowDecoder(SimpleNamespace(decode=decode), skip_special_tokens=True)  # type: ignore[arg-type]  # a fake
    for _ in range(1000):
        decoder.push(1)
    assert sum(decoded) <= 1000 * 2 * 16


def test_the_fixtures_load_the_bundled_model(model: TextModel) -> None:
    assert isinstance(model.tokenizer, Tokenizer)
    assert model.vocabulary_size == MODEL.vocabulary_size
