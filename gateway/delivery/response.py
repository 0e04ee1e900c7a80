"""The HTTP response of a generation: submits the prompts, and aborts them if the client disconnects."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, Self

from starlette.responses import Response

from gateway.server.middleware import add_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from starlette.types import Receive, Scope, Send

    from common.requests import GenerateRequest
    from gateway.generation.generation import Generation
    from gateway.generation.generations import Generations
    from gateway.quotas.quotas import Lease


class Delivery(Protocol):
    """Sends a generation's output to its client."""

    async def deliver(self, generation: Generation, send: Send) -> None:
        """Send the whole response.

        Raises:
            RequestFailedError: the request failed before anything was sent.
        """


class GenerationResponse(Response):
    """Submits the prompts, delivers the result, and aborts all of them when the client disconnects."""

    def __init__(
        self,
        generations: Generations,
        requests: Sequence[GenerateRequest],
        delivery: Delivery,
        take: Callable[[], Awaitable[Lease]],
        buffer_bytes: int | None = None,
    ) -> None:
        """Prepare to submit `requests`; `take` charges them to the quotas first.

        At most about `buffer_bytes` of their text wait for a slow client.
        """
        super().__init__()
        self._take = take
        self._generations = generations
        self._requests = requests
        self._delivery = delivery
        self._buffer_bytes = buffer_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the client.

        Raises:
            PandoError: the requests were refused, or failed before anything was sent.
        """
        lease = await self._take()
        add_headers(scope, lease.headers())
        used_tokens = 0
        try:
            generation = self._generations.open(self._requests, buffer_bytes=self._buffer_bytes)
            try:
                await self._serve(generation, receive, send)
            finally:
                used_tokens = generation.usage.prompt_tokens + generation.usage.completion_tokens
        finally:
            lease.settle(used_tokens)

    async def _serve(self, generation: Generation, receive: Receive, send: Send) -> None:
        watch = ClientWatch(receive)
        generation.on_overflow = watch.cut
        cause = None
        try:
            async with watch:
                await self._delivery.deliver(generation, send)
        except asyncio.CancelledError:
            cause = "shutdown"
            raise
        finally:
            self._generations.close(generation, "disconnect" if watch.gone else cause)


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
