"""Special tokens that users write in a conversation: they are text, and only the chat template's own end turns.

A tokenizer reads `<|im_end|>` as the token of that name anywhere, so that a message could end its turn and begin
another one. In conversations with such texts, the users' special tokens are marked before the template is rendered.
Then the marks are swapped: special tokens of the template get marks, those of users lose them, and a second tokenizer
encodes the result, which has the special tokens under their marked names only. In all other respects it equals the
first one, so its ids are the same wherever users write no special tokens.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from common.types import TokenIds

Json: TypeAlias = Any  # a value decoded from JSON

# Characters of Unicode's private use area; a mark has enough of them, drawn at random in each process, that users
# cannot guess it.
_MARK_ALPHABET: Final = [chr(0xE100 + offset) for offset in range(256)]
_MARK_LENGTH: Final = 12


class SpecialText:
    """The special tokens of a tokenizer, and the encoding of conversations that contain them as text. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Collect the special tokens; the second tokenizer is built on first use."""
        mark = "".join(secrets.choice(_MARK_ALPHABET) for _ in range(_MARK_LENGTH))
        added = tokenizer.get_added_tokens_decoder().values()
        # Longest first, because a shorter one may be the beginning of a longer one.
        contents = sorted((token.content for token in added if token.special and token.content), key=len, reverse=True)
        self._marked = {content: content[0] + mark + content[1:] for content in contents}
        self._plain = {marked: content for content, marked in self._marked.items()}
        # Searching for these takes a fortieth of the time of encoding.
        self._beginnings = tuple({content[:2] for content in contents})
        self._texts = _any_of(contents)
        self._both = _any_of([*self._plain, *contents])
        # Such tokens are matched in normalized text, and normalization may turn other text into them.
        self._is_always_shielded = tokenizer.normalizer is not None and any(
            token.special and token.normalized for token in added
        )
        self._tokenizer = tokenizer
        self._second: tuple[Tokenizer, TokenIds] | None = None
        self._lock = threading.Lock()

    def may_be_in(self, text: str) -> bool:
        """Whether `text` may have to be marked; the first such text can take long."""
        return self._is_always_shielded or any(beginning in text for beginning in self._beginnings)

    def shield(self) -> Shield:
        """Return a shield that marks the texts of one conversation."""
        return Shield(self._marked, self._beginnings, self._texts, is_used=self._is_always_shielded)

    def without_marks(self, text: str) -> str:
        """Return a rendered text without marks."""
        return self._both.sub(lambda found: self._plain.get(found[0], found[0]), text)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a conversation that was rendered from marked texts, [tokens] int32."""
        second, ids = self._second_tokenizer()
        swapped = self._both.sub(lambda found: self._plain.get(found[0]) or self._marked[found[0]], text)
        return ids[np.array(second.encode(swapped, add_special_tokens=False).ids, np.int64)]

    def _second_tokenizer(self) -> tuple[Tokenizer, TokenIds]:
        with self._lock:
            if self._second is None:
                self._second = self._make_second()
            return self._second

    def _make_second(self) -> tuple[Tokenizer, TokenIds]:
        """Return the tokenizer with marked special tokens, and an array that maps its ids to those of the first one."""
        state = json.loads(self._tokenizer.to_str())
        for entry in state["added_tokens"]:
            entry["content"] = self._marked.get(entry["content"], entry["content"])
        _rename(state["model"], self._marked)
        second = Tokenizer.from_str(json.dumps(state))
        ids = np.arange(max(second.get_vocab(with_added_tokens=True).values()) + 1, dtype=np.int32)
        # Tokens that occur only in the list of added tokens may have different ids.
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            found = second.token_to_id(self._marked.get(token.content, token.content))
            assert found is not None, f"{token.content} is an added token of both"
            ids[found] = token_id
        return second, ids


class Shield:
    """Marks special tokens in the texts of one conversation; `is_used` is set if there were any."""

    def __init__(
        self, marked: dict[str, str], beginnings: tuple[str, ...], texts: re.Pattern[str], *, is_used: bool
    ) -> None:
        """`texts` matches the texts to mark, each of which starts with one of `beginnings`."""
        self.is_used = is_used
        self._marked = marked
        self._beginnings = beginnings
        self._texts = texts

    def __call__(self, value: Json) -> Json:
        """Return `value` with marked texts, including keys of objects; texts without special tokens are unchanged."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, list):
            return [self(entry) for entry in value]
        if isinstance(value, dict):
            return {self._mark(key): self(entry) for key, entry in value.items()}
        return value

    def _mark(self, text: str) -> str:
        for beginning in self._beginnings:
            if beginning in text:
                break
        else:
            return text
        found, count = self._texts.subn(lambda match: self._marked[match[0]], text)
        self.is_used = self.is_used or count > 0
        return found


def _any_of(texts: list[str]) -> re.Pattern[str]:
    # An empty class matches nothing.
    return re.compile("|".join(map(re.escape, texts)) or r"[^\s\S]")


def _rename(model: dict[str, Json], names: dict[str, str]) -> None:
    """Rename entries of a tokenizer's model, so that it cannot produce them from plain text either."""
    # Results of merges keep their names: they are composed of pieces that are not special tokens.
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ())
    made = {"".join(merge) for merge in merges}
    names = {old: new for old, new in names.items() if old not in made}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
