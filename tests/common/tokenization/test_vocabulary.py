from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken, Tokenizer, decoders

from common.tokenization.vocabulary import is_bytewise, read_vocabulary
from tests.services.detokenizer.vocabularies import sentence_piece, word_piece

if TYPE_CHECKING:
    from common.tokenization import TextModel


def test_every_id_of_the_bundled_model_decodes_to_its_own_bytes(bundled: TextModel) -> None:
    vocabulary = read_vocabulary(bundled.tokenizer, bundled.vocabulary_size)
    for skip in (False, True):
        data = vocabulary.pieces(skip_special_tokens=skip).data
        assert len(data) == 49152
        for i, piece in enumerate(data):
            assert piece.decode(errors="replace") == bundled.tokenizer.decode([i], skip_special_tokens=skip)


def test_texts_are_the_pieces_that_are_whole_characters(bundled: TextModel) -> None:
    pieces = read_vocabulary(bundled.tokenizer, bundled.vocabulary_size).all_pieces
    for piece, text in zip(pieces.data, pieces.texts, strict=True):
        assert text is None or text.encode() == piece
    assert 0 < sum(text is None for text in pieces.texts) < 2000


def test_special_tokens_keep_their_bytes_for_log_probabilities(bundled: TextModel) -> None:
    vocabulary = read_vocabulary(bundled.tokenizer, bundled.vocabulary_size)
    assert vocabulary.token_bytes(2) == b"<|im_end|>"
    assert vocabulary.plain_pieces.data[2] == b""


def test_ids_that_the_tokenizer_lacks_stand_for_nothing(bundled: TextModel) -> None:
    vocabulary = read_vocabulary(bundled.tokenizer, 49152 + 100)
    assert vocabulary.token_bytes(49200) == b""
    assert vocabulary.token_bytes(10**6) == b""


def test_sentence_piece_tokens_are_bytes_blanks_and_text() -> None:
    tokenizer = sentence_piece()
    vocabulary = read_vocabulary(tokenizer, 0)
    tokens = {token: vocabulary.token_bytes(i) for token, i in tokenizer.get_vocab().items()}
    assert tokens["<0xE6>"] == b"\xe6"
    assert tokens["<0xZZ>"] == b"<0xZZ>"
    assert tokens["▁the"] == b" the"
    assert tokens["▁a▁"] == b" a "
    assert tokens["漢"] == "漢".encode()


def test_metaspace_decoders_are_understood() -> None:
    tokenizer = sentence_piece()
    tokenizer.decoder = decoders.Metaspace()
    assert is_bytewise(tokenizer)
    assert b" the" in read_vocabulary(tokenizer, 0).all_pieces.data


def test_added_tokens_in_clear_text_are_taken_as_they_are(bundled: TextModel) -> None:
    tokenizer = Tokenizer.from_str(bundled.tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<工具 call>", normalized=False)])
    assert read_vocabulary(tokenizer, 0).token_bytes(49152) == "<工具 call>".encode()


@pytest.mark.parametrize(("tokenizer", "bytewise"), [(sentence_piece(), True), (word_piece(), False)])
def test_only_decoders_that_work_token_by_token_are_bytewise(tokenizer: Tokenizer, bytewise: bool) -> None:
    assert is_bytewise(tokenizer) == bytewise
