"""The queue of deltas for one subscriber."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import PandoError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.deltas import Delta
    from common.types import RequestId, SubscriberId

# A subscriber that keeps up never has more than one step's deltas waiting. Above this number, deltas of the same choice
# are merged, so that the queue only grows with the text.
MERGE_AT = 4096
# Above this number of tokens (half a minute of a fast GPU), the subscriber counts as dead.
MAX_WAITING_TOKENS = 1_000_000


class Mailbox:
    """The queue between pushes, which produce deltas, and the stream that sends them to a subscriber."""

    def __init__(self, subscriber_id: SubscriberId, *, merge_at: int = MERGE_AT, max_tokens: int = MAX_WAITING_TOKENS):
        self.subscriber_id = subscriber_id
        self._merge_at = self._merge_next = merge_at
        self._max_tokens = max_tokens
        self._waiting: list[Delta] = []
        self._tokens = 0
        self._arrived = asyncio.Event()
        self._error: PandoError | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the subscription has ended with an error."""
        return self._error is not None

    @property
    def waiting(self) -> int:
        """Number of waiting deltas."""
        return len(self._waiting)

    def post(self, deltas: Iterable[Delta]) -> None:
        """Add deltas; the mailbox closes if more than `max_tokens` tokens wait. No effect on a closed mailbox."""
        if self._error is not None:
            return
        for delta in deltas:
            self._waiting.append(delta)
            self._tokens += len(delta.token_ids)
            if delta.prompt_logprobs is not None:
                self._tokens += sum(1 + len(entry.top) for entry in delta.prompt_logprobs.entries)
        if len(self._waiting) > self._merge_next:
            self._waiting = merge(self._waiting)
            self._merge_next = max(self._merge_at, 2 * len(self._waiting))
        if self._tokens > self._max_tokens:
            self.close(
                UnavailableError(f"subscriber {self.subscriber_id} is too slow: {self._tokens} tokens are waiting")
            )
        self._arrived.set()

    async def take(self) -> Sequence[Delta]:
        """Wait for deltas and return all of them.

        Raises:
            PandoError: the error with which the mailbox was closed.
        """
        await self._arrived.wait()
        if self._error is not None:
            raise self._error
        self._arrived.clear()
        taken, self._waiting, self._tokens = self._waiting, [], 0
        self._merge_next = self._merge_at
        return taken

    def close(self, error: PandoError) -> None:
        """Drop waiting deltas and end the subscription with `error`."""
        if self._error is None:
            self._error = error
            self._waiting = []
            self._arrived.set()


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the deltas with those of each choice joined, in the order of the choices' first deltas."""
    parts: dict[tuple[RequestId, int, int], list[Delta]] = {}
    for delta in deltas:
        # Log probabilities of prompts are bounded already, so their deltas are not joined.
        kind = 0 if delta.prompt_logprobs is None else delta.prompt_logprobs.first + 1
        parts.setdefault((delta.request_id, delta.choice_index, kind), []).append(delta)
    return [_joined(part) if len(part) > 1 else part[0] for part in parts.values()]


def _joined(part: Sequence[Delta]) -> Delta:
    return part[0]._replace(
        token_ids=[token_id for delta in part for token_id in delta.token_ids],
        text="".join([delta.text for delta in part]),
        logprobs=[logprob for delta in part for logprob in delta.logprobs],
        finish=part[-1].finish,
        forced_tokens=sum(delta.forced_tokens for delta in part),
        drafted_tokens=sum(delta.drafted_tokens for delta in part),
    )
