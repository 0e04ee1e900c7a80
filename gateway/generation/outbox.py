"""The queue of updates to one client: updates in order, then the end or a failure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import RequestFailure
    from gateway.generation.journal import ChoiceUpdate

# Rough memory of a waiting update in addition to its text, and of one log probability entry.
UPDATE_BYTES = 200
LOGPROB_BYTES = 400


class Outbox:
    """Connects the pipeline, which puts updates at any time, with the one reader that takes them."""

    def __init__(self, limit_bytes: int | None) -> None:
        """`limit_bytes` None sets no limit."""
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._updates: list[ChoiceUpdate] = []
        self._ended = False
        self._is_nudged = False
        self._failure: RequestFailure | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over_limit(self) -> bool:
        """Whether more bytes wait for the reader than the limit allows."""
        return self._limit_bytes is not None and self._bytes > self._limit_bytes

    def put(self, update: ChoiceUpdate) -> None:
        self._updates.append(update)
        self._bytes += UPDATE_BYTES + len(update.text) + LOGPROB_BYTES * len(update.logprobs)
        if update.prompt_logprobs is not None:
            self._bytes += LOGPROB_BYTES * len(update.prompt_logprobs.entries)
        self._wake()

    def end(self, failure: RequestFailure | None = None) -> None:
        """Mark the end of updates, with the failure that caused it, if any."""
        self._ended = True
        self._failure = failure
        self._wake()

    def clear(self) -> None:
        """Drop all waiting updates."""
        self._updates.clear()
        self._bytes = 0

    def nudge(self) -> None:
        """Wake the reader even if there is no update."""
        self._is_nudged = True
        self._wake()

    async def take(self) -> Sequence[ChoiceUpdate] | None:
        """Wait for updates and return all that are pending; empty at the end, None after a nudge.

        Raises:
            RequestFailedError: the outbox ended with a failure, and all updates before it have been taken.
        """
        while not self._updates:
            if self._failure is not None:
                raise RequestFailedError(self._failure)
            if self._ended:
                return ()
            if self._is_nudged:
                self._is_nudged = False
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        updates, self._updates, self._bytes = self._updates, [], 0
        return updates

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
