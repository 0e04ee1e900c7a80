"""Noticing that a client has gone while it is being served."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.types import Receive


class ClientWatch:
    """Cancels the block it surrounds when the client disconnects, and ends that cancellation at the block's end.

    The block's `finally` clauses run as in any cancellation; after the `async with`, `gone` tells what happened.
    The request's body must have been read: whatever `receive` brings now is the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        """Watch the connection behind `receive`."""
        self.gone = False
        self.was_cut = False
        self._receive = receive
        self._served: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to watch."""
        self._served = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        """Stop watching; swallow the cancellation that came from here."""
        assert self._watcher is not None
        assert self._served is not None
        self._watcher.cancel()
        if not (self.gone or self.was_cut):
            return False
        if kind is None:
            # The block ended in the same moment: the cancellation is still on its way.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                kind = asyncio.CancelledError
        # Whoever else cancelled this task meant it.
        return self._served.uncancel() == 0 and kind is asyncio.CancelledError

    def cut(self) -> None:
        """End the block as if the client had gone."""
        if not (self.gone or self.was_cut):
            self.was_cut = True
            self._cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.was_cut:
            self.gone = True
            self._cancel()

    def _cancel(self) -> None:
        assert self._served is not None
        self._served.cancel()
