from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.models import ModelFiles, ModelKind
from common.tokenization import TextModel, load_text_model
from common.tokenization.gguf_vocabulary import find_split_rule
from common.tokenization.vocabulary import byte_alphabet
from tests.common.tokenization.gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, write
from tests.common.tokenization.transformers_oracle import load_gguf
from tests.texts import TEXTS

if TYPE_CHECKING:
    from pathlib import Path

_WORDS = ("Ġt", "he", "in", "Ġthe", "er", "12", "123", "Ġ1", "ĠĠ", "ĠĠĠ", "'s", "'S", "Ġa", "an", "and", "Ġand", "ä¸")
_MERGES = ("Ġ t", "h e", "i n", "Ġt he", "e r", "1 2", "12 3", "Ġ 1", "Ġ Ġ", "ĠĠ Ġ", "' s", "' S", "Ġ a", "a n", "an d",
           "Ġ and", "ä ¸")  # fmt: skip
_LETTERS = tuple(byte_alphabet().values())

BYTE_LEVEL = Vocabulary(
    model="gpt2",
    # transformers adds <|endoftext|> to whatever it takes for a GPT-2 vocabulary.
    tokens=("<|begin|>", "<|end|>", "<think>", "<|endoftext|>", *_LETTERS, *(w for w in _WORDS if w not in _LETTERS)),
    types=(CONTROL, CONTROL, USER_DEFINED, CONTROL, *([NORMAL] * len({*_LETTERS, *_WORDS}))),
    merges=_MERGES,
    bos=0,
    eos=1,
    flags={"add_bos_token": True},
)

_PIECES = ("▁", "▁t", "he", "▁the", "in", "er", "an", "nd", "and", "▁and", "▁▁", "▁▁▁▁", "ing", "▁a", "a", "b", "c",
           "d", "e", "h", "i", "n", "r", "t", "g", "é", "漢")  # fmt: skip
SENTENCE_PIECE = Vocabulary(
    model="llama",
    tokens=("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES),
    types=(UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(_PIECES))),
    scores=(*([0.0] * 259), *(float(-i) for i in range(len(_PIECES)))),
    bos=1,
    eos=2,
)


def load(path: Path) -> TextModel:
    return load_text_model(ModelFiles(path.name, ModelKind.GGUF, path))


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "gpt-4o", "gpt-2"])
def test_byte_level_vocabularies_encode_as_transformers_does(tmp_path: Path, pre: str) -> None:
    model = load(write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre=pre)))
    oracle = load_gguf(str(tmp_path), "tiny.gguf")
    for text in (*TEXTS, "a<|begin|>the<think>and"):
        assert model.tokenizer.encode(text).ids == oracle(text)["input_ids"], repr(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("deepseek-v3", "x1234 漢字かな.next <b>", ["x", "123", "4", " ", "漢字かな", ".next", " <", "b", ">"]),
        ("deepseek-v3", "It's 50% off!\n\n  Now", ["It", "'s", " ", "50", "%", " off", "!\n\n", " ", " Now"]),
        ("smaug-bpe", "It'S 12345 x.y\n", ["It", "'S", " ", "123", "45", " x", ".y", "\n"]),
        ("glm4", "It'S 12345 漢字!\n x", ["It", "'S", " ", "123", "45", " 漢字", "!\n", " x"]),
    ],
)
def test_texts_are_divided_as_their_models_divide_them(pre: str, text: str, pieces: list[str]) -> None:
    found = find_split_rule(pre).build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


def test_sentence_piece_vocabularies_encode_as_transformers_does(tmp_path: Path) -> None:
    model = load(write(tmp_path / "tiny.gguf", SENTENCE_PIECE))
    oracle = load_gguf(str(tmp_path), "tiny.gguf")
    for text in (*TEXTS, "the </s>and", " leading", "a  b"):
        ids = model.tokenizer.encode(text).ids
        assert ids == oracle(text)["input_ids"], repr(text)
        assert model.tokenizer.decode(ids, skip_special_tokens=True) == oracle.decode(ids, skip_special_tokens=True)


def test_digits_stand_alone_for_smollm(tmp_path: Path) -> None:
    model = load(write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre="smollm")))
    assert model.tokenizer.encode("123", add_special_tokens=False).tokens == ["1", "2", "3"]


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe"])
def test_llama_3_takes_a_piece_that_is_a_token_whole(pre: str, tmp_path: Path) -> None:
    without_merge = replace(BYTE_LEVEL, merges=_MERGES[:-2])  # no way to merge up to "Ġand"
    whole = load(write(tmp_path / "llama.gguf", replace(without_merge, pre=pre))).tokenizer
    merged = load(write(tmp_path / "qwen.gguf", replace(without_merge, pre="qwen2"))).tokenizer
    assert whole.encode(" and", add_special_tokens=False).tokens == ["Ġand"]
    assert merged.encode(" and", add_special_tokens=False).tokens == ["Ġa", "n", "d"]


@pytest.mark.parametrize(("pre", "opens_with_bos"), [("llama-bpe", True), ("qwen2", False)])
def test_bos_follows_the_family_if_the_file_is_silent(tmp_path: Path, pre: str, opens_with_bos: bool) -> None:
    model = load(write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre=pre, flags={})))
    assert (model.tokenizer.encode("the").ids[0] == 0) == opens_with_bos
    assert model.tokenizer.encode("the", add_special_tokens=False).ids[0] != 0


def test_eos_is_added_if_the_file_says_so(tmp_path: Path) -> None:
    flags = {"add_bos_token": False, "add_eos_token": True}
    model = load(write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre="qwen2", flags=flags)))
    assert model.tokenizer.encode("a").tokens == ["a", "<|end|>"]


def test_control_tokens_outside_the_byte_alphabet_keep_their_ids(tmp_path: Path) -> None:
    tokens = ("<｜begin▁of▁sentence｜>", *BYTE_LEVEL.tokens[1:])
    model = load(write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, tokens=tokens, pre="qwen2")))
    ids = model.tokenizer.encode("a<｜begin▁of▁sentence｜>", add_special_tokens=False).ids
    assert ids[-1] == 0
    assert model.tokenizer.get_vocab_size() == len(tokens)
    assert model.tokenizer.decode([0], skip_special_tokens=False) == tokens[0]


def test_an_unknown_way_of_cutting_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre="martian"))
    with pytest.raises(ConfigurationError, match=r"'martian'.*qwen2.*smollm"):
        load(path)


def test_an_unknown_kind_of_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, model="bert"))
    with pytest.raises(ConfigurationError, match="'bert'"):
        load(path)


def test_sentence_piece_without_scores_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", replace(SENTENCE_PIECE, scores=()))
    with pytest.raises(ConfigurationError, match="scores"):
        load(path)


def test_a_file_without_context_length_needs_a_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre="qwen2"), context=None)
    files = ModelFiles("tiny", ModelKind.GGUF, path)
    with pytest.raises(ConfigurationError, match=r"max_context"):
        load_text_model(files)
    assert load_text_model(files, max_context=64).max_context_tokens == 64


@pytest.mark.parametrize(("asked", "limit"), [(0, 512), (100, 100), (4096, 512)])
def test_max_context_only_lowers_the_models_own(tmp_path: Path, asked: int, limit: int) -> None:
    path = write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre="qwen2"))
    files = ModelFiles("tiny", ModelKind.GGUF, path)
    assert load_text_model(files, max_context=asked).max_context_tokens == limit


def test_the_chat_template_is_read(tmp_path: Path) -> None:
    model = load(write(tmp_path / "tiny.gguf", replace(BYTE_LEVEL, pre="qwen2", chat_template="{{ messages }}")))
    assert model.chat_templates == {"default": "{{ messages }}"}
    assert model.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
