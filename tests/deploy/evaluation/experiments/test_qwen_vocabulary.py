"""Directories with Qwen3's vocabulary: texts are encoded as Qwen3 models do, and other files are refused."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from common.models import resolve_model
from common.tokenization import load_text_model
from deploy.evaluation.experiments.qwen_vocabulary import (
    MEMBER,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    WHOLE_TOKENS,
    VocabularyError,
    describe_tokenizer,
    last_merge,
    main,
    read_file,
    read_ranks,
    write_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

SHAPE = Path("deploy/evaluation/shapes/llama-3.1-8b")
WORDS = (b"he", b"ll", b"lo", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world")
TEXTS = ("hello world", "Grüße, 12 345 €!\n\n\tdone ", "你好，世界 🙂", "e\u0301", "we'll\r\nhe'S", "")
# Of tokenizer.json in the repositories of Qwen3's models.
PUBLISHED_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"


def in_tiktoken_form(tokens: Iterable[bytes], ranks: Iterable[int] | None = None) -> bytes:
    numbered = zip(tokens, count() if ranks is None else ranks, strict=False)
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in numbered)


def single_bytes() -> list[bytes]:
    # Qwen's first token is no null byte.
    return [bytes([(byte + ord("!")) % 256]) for byte in range(256)]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    ranks = read_ranks(in_tiktoken_form([*single_bytes(), *WORDS]))
    return Tokenizer.from_str(json.dumps(describe_tokenizer(ranks)))


@pytest.mark.parametrize("text", TEXTS)
def test_encoded_texts_are_decoded_to_their_normal_form(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text).ids) == text.replace("e\u0301", "é")


def test_words_are_joined_in_the_order_of_ranks(small: Tokenizer) -> None:
    tokens = {word: 256 + at for at, word in enumerate(WORDS)}
    assert small.encode("hello world").ids == [tokens[b"hello"], tokens[b" world"]]
    assert small.encode("hell").ids == [tokens[b"hell"]]
    assert small.encode("hel").ids == [tokens[b"he"], single_bytes().index(b"l")]


def test_special_tokens_follow_the_ranks_and_digits_stand_alone(small: Tokenizer) -> None:
    first = 256 + len(WORDS)
    whole = (*SPECIAL_TOKENS, *WHOLE_TOKENS)
    assert len(whole) == 26
    assert small.encode("".join(whole)).ids == list(range(first, first + 26))
    assert len(small.encode("1234").ids) == 4
    assert small.decode(small.encode("<|im_start|>hello<think>").ids) == "hello<think>"


def test_the_last_merge_of_a_token_uses_only_earlier_ones() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"bc": 256, b"ab": 257, b"abc": 258}
    assert last_merge(b"abc", ranks) == (b"a", b"bc")
    assert last_merge(b"ab", ranks) == (b"a", b"b")
    with pytest.raises(VocabularyError, match="abcd"):
        last_merge(b"abcd", {**ranks, b"abc": 400, b"abcd": 258})


def test_a_directory_is_served_with_its_vocabulary_and_chat_template(tmp_path: Path) -> None:
    ranks = read_ranks(in_tiktoken_form([*single_bytes(), *WORDS]))
    write_directory(describe_tokenizer(ranks), SHAPE, tmp_path / "model")
    model = load_text_model(resolve_model(str(tmp_path / "model"), weights=False))
    assert model.vocabulary_size == VOCABULARY_SIZE
    assert "<|im_start|>" in model.chat_templates["default"]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["hidden_size"] == 4096
    assert config["eos_token_id"] == model.tokenizer.token_to_id("<|im_end|>") == 256 + len(WORDS) + 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nno base64! 1\n", "not a tiktoken file"),
        (b"IQ==\n", "not a tiktoken file"),
        (in_tiktoken_form([*single_bytes(), b"he"], [*range(256), 257]), "ranks are not"),
        (in_tiktoken_form([*single_bytes(), b"a"]), "tokens appear twice"),
        (in_tiktoken_form(single_bytes()[1:]), "some bytes"),
    ],
)
def test_damaged_vocabularies_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        read_ranks(content)


def test_another_vocabulary_is_refused_with_both_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "qwen.tiktoken"
    file.write_bytes(in_tiktoken_form(single_bytes()))
    assert main([str(file), str(SHAPE), str(tmp_path / "model")]) == 1
    assert hashlib.sha256(file.read_bytes()).hexdigest() in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_wheel_is_read_and_one_without_the_vocabulary_refused(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.whl", tmp_path / "wrong.whl"
    for wheel, member in ((right, MEMBER), (wrong, "dashscope/other.txt")):
        with zipfile.ZipFile(wheel, "w") as made:
            made.writestr(member, "content")
    assert read_file(right) == b"content"
    with pytest.raises(VocabularyError, match=r"wrong\.whl"):
        read_file(wrong)


@pytest.mark.extended
def test_the_whole_vocabulary_is_that_of_published_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(tmp_path), "dashscope==2.0.2"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"the wheel cannot be downloaded: {done.stderr[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    assert main([str(wheel), str(SHAPE), str(tmp_path / "model")]) == 0
    file = tmp_path / "model" / "tokenizer.json"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == PUBLISHED_SHA256
    model = load_text_model(resolve_model(str(tmp_path / "model"), weights=False))
    assert model.tokenizer.encode("Hello world<|im_start|><|im_end|>").ids == [9707, 1879, 151_644, 151_645]
    for text in TEXTS:
        assert model.tokenizer.decode(model.tokenizer.encode(text).ids) == text.replace("e\u0301", "é")
