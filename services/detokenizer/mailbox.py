"""What waits for one subscriber."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import PandoError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.deltas import Delta
    from common.types import RequestId, SubscriberId

# A subscriber that reads at once never has more than a step's deltas here. Beyond this many, those of one choice are
# merged, so that what waits grows with the text only.
MERGE_AT = 4096
# Beyond this many tokens (half a minute of a fast GPU) the subscriber is taken for dead.
MAX_WAITING_TOKENS = 1_000_000


class Mailbox:
    """Deltas between the pushes that make them and the stream that carries them away."""

    def __init__(self, subscriber_id: SubscriberId, *, merge_at: int = MERGE_AT, max_tokens: int = MAX_WAITING_TOKENS):
        """Begin empty."""
        self.subscriber_id = subscriber_id
        self._merge_at = self._merge_next = merge_at
        self._max_tokens = max_tokens
        self._waiting: list[Delta] = []
        self._tokens = 0
        self._arrived = asyncio.Event()
        self._error: PandoError | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be delivered any more."""
        return self._error is not None

    @property
    def waiting(self) -> int:
        """Number of deltas that wait to be taken."""
        return len(self._waiting)

    def post(self, deltas: Iterable[Delta]) -> None:
        """Add deltas; a mailbox that overflows closes."""
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
                UnavailableError(f"subscriber {self.subscriber_id} does not keep up: {self._tokens} tokens wait")
            )
        self._arrived.set()

    async def take(self) -> Sequence[Delta]:
        """Wait for deltas and return all there are.

        Raises:
            PandoError: the mailbox was closed, for this reason.
        """
        await self._arrived.wait()
        if self._error is not None:
            raise self._error
        self._arrived.clear()
        taken, self._waiting, self._tokens = self._waiting, [], 0
        self._merge_next = self._merge_at
        return taken

    def close(self, error: PandoError) -> None:
        """Drop what waits and end the subscription with `error`."""
        if self._error is None:
            self._error = error
            self._waiting = []
            self._arrived.set()


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the same deltas with those of each choice joined, in the order in which the choices began."""
    parts: dict[tuple[RequestId, int, int], list[Delta]] = {}
    for delta in deltas:
        # What is told of a prompt is bounded already, and stays by itself.
        kind = 0 if delta.prompt_logprobs is None else delta.prompt_logprobs.first + 1
        parts.setdefault((delta.request_id, delta.choice_index, kind), []).append(delta)
    return [_joined(part) if len(part) > 1 else part[0] for part in parts.values()]


def _joined(part: Sequence[Delta]) -> Delta:
    return part[0]._replace(
        token_ids=[token_id for delta in part for token_id in delta.token_ids],
        text="".join([delta.text for delta in part]),
        logprobs=[logprob for delta in part for logprob in delta.logprobs],
        finish=part[-1].finish,
    )
