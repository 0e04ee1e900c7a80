from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.texts import TEXTS

if TYPE_CHECKING:
    from common.tokenization import TextModel
    from tests.common.tokenization.transformers_oracle import OracleTokenizer


def test_there_are_enough_texts_to_compare() -> None:
    assert len(set(TEXTS)) >= 140


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_transformers(bundled: TextModel, oracle: OracleTokenizer, text: str) -> None:
    assert bundled.tokenizer.encode(text, add_special_tokens=True).ids == oracle(text)["input_ids"]


@pytest.mark.parametrize("skip", [False, True])
def test_decoding_equals_transformers(bundled: TextModel, oracle: OracleTokenizer, skip: bool) -> None:
    for text in TEXTS:
        ids = bundled.tokenizer.encode(text).ids
        assert bundled.tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_special_tokens_and_limits_are_the_files_own(bundled: TextModel, oracle: OracleTokenizer) -> None:
    assert dict(bundled.special_tokens) == oracle.special_tokens_map
    assert bundled.max_context_tokens == 8192
    assert bundled.vocabulary_size == 49152
    assert set(bundled.chat_templates) == {"default"}


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from common.models import resolve_model; from common.tokenization import load_text_model;"
        "load_text_model(resolve_model('smollm2-135m-instruct'));"
        "print(sorted({'torch', 'transformers', 'gguf', 'llama_cpp', 'llm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
