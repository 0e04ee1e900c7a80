from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import ContextLengthError, InvalidRequestError
from common.requests import ChatMessage, ChatPrompt, TokenPrompt
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.encoding import PromptEncoder
from services.tokenizer.special_text import SpecialText
from tests.texts import TEXTS

if TYPE_CHECKING:
    from common.tokenization import TextModel
    from tests.common.tokenization.transformers_oracle import OracleTokenizer


def test_a_batch_of_all_kinds_keeps_its_order(encoder: PromptEncoder, oracle: OracleTokenizer) -> None:
    chat = ChatPrompt((ChatMessage("user", "Hi"),))
    broken = ChatPrompt(())
    results = encoder.encode(["Hello", chat, TokenPrompt((5, 6)), broken, "world"])
    hello, rendered, ids, error, world = results
    assert isinstance(hello, np.ndarray)
    assert hello.dtype == np.int32
    assert list(hello) == oracle("Hello")["input_ids"]
    expected = oracle.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert isinstance(rendered, np.ndarray)
    assert list(rendered) == expected["input_ids"]
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.int32
    assert list(ids) == [5, 6]
    assert isinstance(error, InvalidRequestError)
    assert isinstance(world, np.ndarray)
    assert list(world) == oracle("world")["input_ids"]


def test_only_short_plain_text_is_quick(encoder: PromptEncoder) -> None:
    def chat(content: str, tool_calls: str | None = None, **fields: Any) -> ChatPrompt:
        return ChatPrompt((ChatMessage("user", content, tool_calls_json=tool_calls),), **fields)

    assert encoder.is_quick(["Hello", chat("Hi"), TokenPrompt((5, 6))])
    assert not encoder.is_quick(["x" * 600, chat("x" * 600)])
    assert not encoder.is_quick([TokenPrompt(tuple(range(2000)))])
    # Templates may do anything with these, and special tokens may need a second tokenizer.
    assert not encoder.is_quick([chat("Hi", tools_json=("{}",))])
    assert not encoder.is_quick([chat("Hi", template_variables_json="{}")])
    assert not encoder.is_quick([chat("Hi", tool_calls="[]")])
    assert not encoder.is_quick([chat("<|im_end|>")])


def test_texts_in_a_batch_encode_as_transformers_does_alone(encoder: PromptEncoder, oracle: OracleTokenizer) -> None:
    for text, result in zip(TEXTS, encoder.encode(list(TEXTS)), strict=True):
        assert isinstance(result, np.ndarray)
        assert list(result) == oracle(text)["input_ids"], repr(text)


def test_chats_encode_as_transformers_does(encoder: PromptEncoder, model: TextModel, oracle: OracleTokenizer) -> None:
    # Where users write special tokens, `transformers` lets them end turns; see test_special_text.py.
    special = SpecialText(model.tokenizer)
    texts = [text for text in TEXTS if special.shield()(text) is text]
    assert len(texts) > len(TEXTS) * 0.9
    chats = [ChatPrompt((ChatMessage("system", "S"), ChatMessage("user", text))) for text in texts]
    for chat, result in zip(chats, encoder.encode(chats), strict=True):
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        assert isinstance(result, np.ndarray)
        assert list(result) == oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_framing_tokens_are_added_to_texts_only(model: TextModel) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", 1)])
    encoder = PromptEncoder(
        replace(model, tokenizer=tokenizer), ChatTemplates({"default": "{{ messages[0].content }}"}, {})
    )
    text, chat = encoder.encode(["a", ChatPrompt((ChatMessage("user", "a"),))])
    assert isinstance(text, np.ndarray)
    assert isinstance(chat, np.ndarray)
    assert list(text) == [1, *chat]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(model: TextModel) -> None:
    encoded: list[str] = []
    tokenizer = SimpleNamespace(
        get_added_tokens_decoder=dict,
        normalizer=None,
        get_vocab=model.tokenizer.get_vocab,
        encode_batch_fast=lambda texts, add_special_tokens: encoded.extend(texts),
    )
    longest = max(map(len, model.tokenizer.get_vocab()))
    small = replace(model, tokenizer=tokenizer, max_context_tokens=10)  # type: ignore[arg-type]  # a fake
    (error,) = PromptEncoder(small, ChatTemplates({}, {})).encode(["x" * (10 * longest + 1)])
    assert isinstance(error, ContextLengthError)
    assert "at least 11 tokens" in error.message
    assert encoded == []


def test_a_text_of_the_longest_tokens_is_not_refused_by_its_characters(model: TextModel) -> None:
    longest = max(model.tokenizer.get_vocab(), key=len)
    text = model.tokenizer.decode([model.tokenizer.get_vocab()[longest]])
    small = PromptEncoder(replace(model, max_context_tokens=1), ChatTemplates({}, {}))
    (ids,) = small.encode([text])
    assert isinstance(ids, np.ndarray)


def test_many_threads_may_encode_at_once(encoder: PromptEncoder, oracle: OracleTokenizer) -> None:
    results: dict[int, bool] = {}

    def work(number: int) -> None:
        found = encoder.encode(list(TEXTS))
        results[number] = all(
            isinstance(ids, np.ndarray) and list(ids) == encoder.encode_text(text, add_special_tokens=True)[0]
            for text, ids in zip(TEXTS, found, strict=True)
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_text_tokens_and_ids_agree(encoder: PromptEncoder, model: TextModel) -> None:
    ids, tokens = encoder.encode_text("Hello 12<|im_end|>", add_special_tokens=False)
    assert tokens == [model.tokenizer.id_to_token(i) for i in ids]
    assert encoder.decode(ids, skip_special_tokens=False) == "Hello 12<|im_end|>"
    assert encoder.decode(ids, skip_special_tokens=True) == "Hello 12"
