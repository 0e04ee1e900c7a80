from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.content.text import ByteTranscript, DecodedTranscript, Transcriber

if TYPE_CHECKING:
    from common.tokenization import TextModel


def test_a_prompt_becomes_its_text_with_special_tokens_spelled_out(model: TextModel) -> None:
    text = "<|im_start|>system\nKeep 漢字 and 😀 safe.<|im_end|>\n"
    ids = np.array(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    transcriber = Transcriber(model)
    transcript = transcriber.transcribe(ids)
    assert transcript.text == text
    for start, character in enumerate(text):
        token = transcript.token_of(start)
        before = transcriber.transcribe(ids[:token]).text.rstrip("\ufffd")
        assert len(before) <= start, character


def test_reading_ends_at_the_first_id_without_text(model: TextModel) -> None:
    transcriber = Transcriber(model)
    assert transcriber.readable_tokens(np.array([10, 11, 12], np.int32)) == 3
    assert transcriber.readable_tokens(np.array([10, 10_000_000, 12], np.int32)) == 1
    assert transcriber.readable_tokens(np.array([-1, 12], np.int32)) == 0


@given(st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=20))
def test_each_character_is_in_the_token_that_holds_its_first_byte(pieces: list[bytes]) -> None:
    transcript = ByteTranscript(pieces)
    data = b"".join(pieces)
    exact = data.decode("utf-8", "surrogateescape")
    assert len(transcript.text) == len(exact)
    assert transcript.text.encode() is not None
    owners = [index for index, piece in enumerate(pieces) for _ in piece]
    place = 0
    for start, character in enumerate(exact):
        assert transcript.token_of(start) == owners[place]
        place += len(character.encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize(("start", "token"), [(0, 0), (3, 0), (4, 1), (7, 2), (8, 2)])
def test_tokens_with_context_dependent_text_are_located_by_the_text_they_add(start: int, token: int) -> None:
    prefixes = ["", "the ", "the run", "the running"]
    transcript = DecodedTranscript(3, prefixes.__getitem__)
    assert transcript.text == "the running"
    assert transcript.token_of(start) == token
