"""Log probabilities of prompts: their collection, and their shapes in three APIs."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.endpoints.shapes import LEAST_LOGPROB, finite_logprob, token_string

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import LogprobText, PromptLogprobsText, TokenText


@dataclass(slots=True)
class PromptScores:
    """The log probabilities received for one prompt, shared by all its choices."""

    # The first reported token, which has no log probability.
    lead: TokenText | None = None
    entries: list[LogprobText] = field(default_factory=list)
    is_complete: bool = False

    def add(self, part: PromptLogprobsText) -> None:
        """Append a part."""
        self.lead = part.lead or self.lead
        self.entries.extend(part.entries)
        self.is_complete = part.is_last

    @property
    def tokens(self) -> list[TokenText]:
        """All reported tokens."""
        return [*([self.lead] if self.lead else []), *(entry.token for entry in self.entries)]


def legacy_object(scores: PromptScores, top: int, echo: str) -> tuple[dict[str, list[object]], int]:
    """Return them in the shape of completions, for a prompt echoed as `echo`, and the text offset after it."""
    # A character that spans several tokens counts for its last token.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(token.text)) for token in scores.tokens]
    # Counted from the end, because the prompt's text may lack special tokens at its beginning.
    offsets, end = [], len(echo)
    for length in reversed(lengths):
        end = max(end - length, 0)
        offsets.append(end)
    nothing: list[object] = [None] if scores.lead else []
    shape: dict[str, list[object]] = {
        "tokens": [token_string(token) for token in scores.tokens],
        "token_logprobs": nothing + [finite_logprob(entry.token) for entry in scores.entries],
        "top_logprobs": nothing + [legacy_top(entry, top) for entry in scores.entries],
        "text_offset": list(reversed(offsets)),
    }
    return shape, len(echo)


def legacy_top(entry: LogprobText, top: int) -> dict[str, float]:
    """Return the most likely tokens, and the token itself even if it is not among them."""
    return {token_string(token): finite_logprob(token) for token in (entry.token, *entry.top[:top])}


def by_id(scores: PromptScores, top: int) -> list[object]:
    """Return them in vLLM's shape: for each token an object keyed by id, null for the first."""
    nothing: list[object] = [None] if scores.lead else []
    return nothing + [_ids_object(entry, top) for entry in scores.entries]


def _ids_object(entry: LogprobText, top: int) -> dict[str, object]:
    ranked = [(token, rank) for rank, token in enumerate(entry.top[:top], 1)]
    return {
        str(token.token_id): {
            "logprob": finite_logprob(token),
            "rank": rank,
            "decoded_token": token.text.decode("utf-8", "replace"),
        }
        for token, rank in (*ranked, (entry.token, entry.rank))
    }


def native_triples(scores: PromptScores) -> list[object]:
    """Return them in SGLang's shape: log probability, id, text."""
    tokens = [(None, scores.lead)] if scores.lead else []
    pairs = [*tokens, *((finite_logprob(entry.token), entry.token) for entry in scores.entries)]
    return [[value, token.token_id, token.text.decode("utf-8", "replace")] for value, token in pairs]


def native_tops(scores: PromptScores) -> list[object]:
    """Return the most likely tokens of each position in SGLang's shape."""
    nothing: list[object] = [None] if scores.lead else []
    return nothing + [native_top(entry) for entry in scores.entries]


def native_top(entry: LogprobText) -> list[object]:
    """Return the most likely tokens at one position."""
    return [[finite_logprob(token), token.token_id, token.text.decode("utf-8", "replace")] for token in entry.top]


def native_asked(scores: PromptScores, token_ids: Sequence[int]) -> list[object]:
    """Return the log probabilities of `token_ids` at each position in SGLang's shape."""
    nothing: list[object] = [None] if scores.lead else []
    return nothing + [asked_triples(entry, token_ids) for entry in scores.entries]


def asked_triples(entry: LogprobText, token_ids: Sequence[int]) -> list[object]:
    """Return the log probabilities of `token_ids` at one position."""
    return [[max(value, LEAST_LOGPROB), token_id, None] for value, token_id in zip(entry.asked, token_ids, strict=True)]
