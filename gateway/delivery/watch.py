"""Detects that a client has disconnected while it is served."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.types import Receive


class ClientWatch:
    """Cancels the block it surrounds when the client disconnects, and absorbs that cancellation at the block's end.

    The block's `finally` clauses run as in any cancellation; after the `async with`, `gone` is set if the client
    disconnected. The request's body must have been read before: the next message of `receive` is then the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self.was_cut = False
        self._receive = receive
        self._served: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._served = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        """Stop watching; suppress only the cancellation that this object requested."""
        assert self._watcher is not None
        assert self._served is not None
        self._watcher.cancel()
        if not (self.gone or self.was_cut):
            return False
        if kind is None:
            # The block ended at the same moment; the cancellation has not been delivered yet.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                kind = asyncio.CancelledError
        # A cancellation that came from elsewhere propagates.
        return self._served.uncancel() == 0 and kind is asyncio.CancelledError

    def cut(self) -> None:
        """Cancel the block as if the client had disconnected."""
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
