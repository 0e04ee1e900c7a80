"""Write a model directory with Qwen3's vocabulary and a given shape, for measurements with random weights.

Run as `python -m deploy.evaluation.experiments.qwen_vocabulary FILE SHAPE DIRECTORY`, such as
`… dashscope-2.0.2-py3-none-any.whl deploy/evaluation/shapes/qwen3-0.6b qwen3-0.6b/`.

FILE is `qwen.tiktoken`, or a wheel of the PyPI package `dashscope`, which contains it: `pip download --no-deps
dashscope==2.0.2`. DIRECTORY gets tokenizer.json, tokenizer_config.json with a ChatML template, and SHAPE's config.json
with the size of Qwen3's vocabulary. There are no weights: serve it with model.load_format=dummy.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import json
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from common.tokenization.gguf_vocabulary import find_split_rule
from common.tokenization.vocabulary import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MEMBER: Final = "dashscope/resources/qwen.tiktoken"
SHA256: Final = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
# Rows of the embedding; ids above those of the tokens below have no text.
VOCABULARY_SIZE: Final = 151_936
END_OF_TEXT: Final = "<|endoftext|>"
END_OF_TURN: Final = "<|im_end|>"
# In the order of their ids, which follow those of the ranks.
SPECIAL_TOKENS: Final = (
    END_OF_TEXT, "<|im_start|>", END_OF_TURN, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# These are matched as a whole, too, but are part of texts.
WHOLE_TOKENS: Final = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class VocabularyError(Exception):
    """The file is not the vocabulary that is expected."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the directory; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="qwen.tiktoken, or a wheel of dashscope")
    parser.add_argument("shape", type=Path, help="directory with config.json, as in deploy/evaluation/shapes")
    parser.add_argument("directory", type=Path, help="where to write")
    arguments = parser.parse_args(argv)
    try:
        ranks = read_ranks(verified(read_file(arguments.file)))
        write_directory(describe_tokenizer(ranks), arguments.shape, arguments.directory)
    except (VocabularyError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def read_file(file: Path) -> bytes:
    """Return the contents of `qwen.tiktoken`, from a wheel that contains it or directly.

    Raises:
        VocabularyError: the wheel does not contain it.
        OSError: the file cannot be read.
    """
    if not zipfile.is_zipfile(file):
        return file.read_bytes()
    with zipfile.ZipFile(file) as wheel:
        if MEMBER not in wheel.namelist():
            raise VocabularyError(f"{file} does not contain {MEMBER}, as wheels of dashscope 2.0.2 do")
        return wheel.read(MEMBER)


def verified(content: bytes) -> bytes:
    """Return `content` as it is.

    Raises:
        VocabularyError: it is not Qwen's vocabulary.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise VocabularyError(
            f"the vocabulary has the SHA-256 {found}, and not {SHA256}: it is damaged, or another one"
        )
    return content


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Return the tokens of a tiktoken file with their ranks, which are their ids; lines are `BASE64 RANK`.

    Raises:
        VocabularyError: a line is of another form, a byte is missing, or ranks are not 0, 1, 2 and so on.
    """
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise VocabularyError(f"not a tiktoken file, whose lines are a token in base64 and a rank: {error}") from error
    if list(ranks.values()) != list(range(len(pairs))):
        raise VocabularyError("the ranks are not 0, 1, 2 and so on, or tokens appear twice")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise VocabularyError("some bytes are not tokens, so that not every text could be encoded")
    return ranks


def describe_tokenizer(ranks: Mapping[bytes, int]) -> dict[str, Any]:
    """Return the contents of tokenizer.json for tokens with ranks, which special tokens follow.

    Of Qwen's ranks, `write_directory` writes the file that Qwen3 models are published with, byte by byte.
    """
    letters = byte_alphabet()

    def spelled(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    (pattern,) = find_split_rule("qwen2").patterns
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    merges = [last_merge(token, ranks) for token in ranks if len(token) > 1]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(ranks) + at, "content": token, **flags, "special": token in SPECIAL_TOKENS}
            for at, token in enumerate((*SPECIAL_TOKENS, *WHOLE_TOKENS))
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges],
        },
    }


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two tokens of lower ranks that byte pair encoding joins to `token` in the end.

    tokenizer.json lists one merge for each token, tiktoken's files only the tokens.

    Raises:
        VocabularyError: lower ranks do not make two tokens of it.
    """
    parts, limit = [bytes([byte]) for byte in token], ranks[token]
    while len(parts) > 2:
        joined = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        best = min(joined)
        if best >= limit:
            raise VocabularyError(f"no merges of tokens before {token!r} (rank {limit}) make two parts of it")
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def write_directory(tokenizer: Mapping[str, Any], shape: Path, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and config.json to `target`.

    Raises:
        OSError: the shape cannot be read, or the directory cannot be written.
    """
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    config |= {"vocab_size": VOCABULARY_SIZE, "bos_token_id": ids[END_OF_TEXT], "eos_token_id": ids[END_OF_TURN]}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    target.mkdir(parents=True, exist_ok=True)
    files = {"config.json": config, "tokenizer_config.json": settings, "tokenizer.json": tokenizer}
    for name, value in files.items():
        (target / name).write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
