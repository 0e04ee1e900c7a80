"""Encodes prompts to token ids, many in one call. Only prompts that are `is_quick` may be encoded on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, assert_never

import numpy as np

from common.errors import ContextLengthError, PandoError
from common.requests import ChatPrompt, PooledText, TokenPrompt
from services.tokenizer.pooled_text import EncodedPair, PooledTextEncoder
from services.tokenizer.special_text import SpecialText
from services.tokenizer.template_style import TemplateStyle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.requests import ChatMessage, Prompt
    from common.tokenization import TextModel
    from common.types import TokenIds
    from services.tokenizer.chat_template import ChatTemplates

NO_STYLE = TemplateStyle()
# Encoding this much takes one or two tenths of a millisecond, about as long as starting a job in a thread.
QUICK_CHARACTERS = 1024
# The cost of a message in addition to its text, in characters.
MESSAGE_CHARACTERS = 64
Encoded: TypeAlias = "TokenIds | EncodedPair | PandoError"


class PromptEncoder:
    """Tokenizer and chat templates of one model.

    Thread-safe: the tokenizer is immutable and releases the interpreter's lock.
    """

    def __init__(self, model: TextModel, templates: ChatTemplates, style: TemplateStyle = NO_STYLE) -> None:
        """`style` is that of the model's templates."""
        self.style = style
        self._tokenizer = model.tokenizer
        self._special = SpecialText(model.tokenizer)
        self._templates = templates
        self._max_context_tokens = model.max_context_tokens
        # No token represents more characters: byte-level entries have one letter per byte, others one per character.
        self._longest_token = max(map(len, model.tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._pooled = PooledTextEncoder(
            model.tokenizer, self._special, model.embedding.pair_style, self._longest_token
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._templates)

    def is_quick(self, prompts: Sequence[Prompt]) -> bool:
        """Whether encoding takes no longer than a round trip to another thread."""
        return all(map(self._is_predictable, prompts)) and sum(map(size, prompts)) <= QUICK_CHARACTERS

    def encode(
        self, prompts: Sequence[Prompt], add_special_tokens: Sequence[bool | None] | None = None
    ) -> list[Encoded]:
        """Return the ids of each prompt, or the error that prevents encoding it.

        Texts get the special tokens that the model adds, such as BOS, unless `add_special_tokens` is False; chat
        templates contain their special tokens.
        """
        adds = add_special_tokens or [None] * len(prompts)
        encoded: list[Encoded | None] = [None] * len(prompts)
        texts: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
        for i, prompt in enumerate(prompts):
            try:
                if isinstance(prompt, str):
                    texts[adds[i] is not False].append((i, self._guarded(prompt, "prompt")))
                elif isinstance(prompt, ChatPrompt):
                    text, ids = self._read_chat(prompt)
                    if ids is None:
                        texts[False].append((i, text))
                    encoded[i] = ids
                else:
                    encoded[i] = self._encode_other(prompt)
            except PandoError as error:
                encoded[i] = error
        for adds_special, entries in texts.items():
            if entries:
                batch = [text for _, text in entries]
                found = self._tokenizer.encode_batch_fast(batch, add_special_tokens=adds_special)
                for (i, _), encoding in zip(entries, found, strict=True):
                    encoded[i] = np.array(encoding.ids, dtype=np.int32)
        return [result for result in encoded if result is not None]

    def _encode_other(self, prompt: TokenPrompt | PooledText) -> TokenIds | EncodedPair:
        if isinstance(prompt, TokenPrompt):
            # fixed32 ids on the wire may exceed int32; they become negative, and no vocabulary has negative ids.
            return np.array(prompt.ids, dtype=np.uint32).astype(np.int32)
        if prompt.truncation is None:
            self._guarded(prompt.text + (prompt.second or ""), "prompt")
        return self._pooled.encode(prompt)

    def encode_text(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Return the ids of a text and their vocabulary entries."""
        encoding = self._tokenizer.encode(self._guarded(text, "text"), add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.tokens

    def ban(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences for `words`, both without and with a leading blank."""
        spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
        found = self._tokenizer.encode_batch_fast(spellings, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in found if encoding.ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render(self, chat: ChatPrompt) -> tuple[str, list[int]]:
        """Return the rendered prompt of a conversation, as text and ids."""
        text, ids = self._read_chat(chat)
        return text, self._tokenizer.encode(text, add_special_tokens=False).ids if ids is None else ids.tolist()

    def _is_predictable(self, prompt: Prompt) -> bool:
        """Whether the time to encode the prompt can be estimated from its size."""
        if not isinstance(prompt, ChatPrompt):
            return True
        if prompt.tools_json or prompt.template_variables_json:
            return False
        return not any(
            message.tool_calls_json or any(map(self._special.may_be_in, _texts_of(message)))
            for message in prompt.messages
        )

    def _read_chat(self, chat: ChatPrompt) -> tuple[str, TokenIds | None]:
        """Return the rendered prompt, and its ids if it contains special tokens that are text."""
        shield = self._special.shield()
        text = self._templates.render(
            chat,
            shield,
            takes_arguments_as_text=self.style.takes_arguments_as_text,
            has_single_calls=self.style.has_single_calls,
            takes_parts=self.style.takes_parts,
            tool_style=self.style.tools,
        )
        if not shield.is_used:
            return self._guarded(text, "messages"), None
        plain = self._guarded(self._special.without_marks(text), "messages")
        return plain, self._special.encode(text)

    def _guarded(self, text: str, what: str) -> str:
        """Return `text`, unless it exceeds the context in any case: encoding megabytes first would delay others."""
        least = -(-len(text) // self._longest_token)
        if least > self._max_context_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {self._max_context_tokens} tokens. However, your {what} came "
                f"to {len(text)} characters, at least {least} tokens. Please reduce the length of the {what}.",
                param=what,
            )
        return text


def size(prompt: Prompt) -> int:
    """Return the approximate number of characters or ids to encode."""
    match prompt:
        case TokenPrompt():
            return len(prompt.ids)
        case str():
            return len(prompt)
        case PooledText():
            return len(prompt.text) + len(prompt.second or "") + len(prompt.instruction or "")
        case ChatPrompt():
            texts = [*prompt.tools_json, prompt.template_variables_json or "", prompt.assistant_prefix or ""]
            for message in prompt.messages:
                texts += [*_texts_of(message), message.tool_calls_json or "", message.reasoning_content or ""]
            return sum(map(len, texts)) + MESSAGE_CHARACTERS * len(prompt.messages)
        case _ as never:
            assert_never(never)


def _texts_of(message: ChatMessage) -> list[str]:
    return [message.content or "", *(part for part in message.parts if isinstance(part, str))]
