"""The call over which a lender permits and confirms reads of its mapped memory.

One for all reads: to open one takes longer than all messages of a read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import grpc

from common.errors import InvalidRequestError, PermissionDeniedError
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine.host_tier.shared_pages import SharingError

if TYPE_CHECKING:
    from collections.abc import Coroutine


class ReadCall:
    """Owns the call. Methods belong to the event loop.

    Requests of several reads may be under way at the same time, one of each.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Call the worker of a channel."""
        self._call = worker_pb2_grpc.WorkerStub(channel).ReadMappedPages()
        # grpc sends one message at a time.
        self._sending = asyncio.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[worker_pb2.ReadMappedPagesResponse]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_over = False
        # After so long without word of a read the worker breaks it off; 0: not known.
        self.silence_s = 0.0
        self._start(self._receive())

    def new_read(self) -> int:
        """Return the number of another read."""
        return next(self._numbers)

    async def ask(self, request: worker_pb2.ReadMappedPagesRequest) -> worker_pb2.ReadMappedPagesResponse:
        """Send a request and return its answer.

        Raises:
            PermissionDeniedError: the lease has ended, or does not have the pages.
            InvalidRequestError: the worker has other memory by now, or the request is not possible.
            AioRpcError: the connection broke.
            SharingError: the worker has ended the call.
        """
        if self.is_over:
            raise SharingError("the call for reads has ended")
        answer: asyncio.Future[worker_pb2.ReadMappedPagesResponse] = asyncio.get_running_loop().create_future()
        self._answers[request.read] = answer
        try:
            await self._send(request)
            response = await answer
            self.silence_s = response.silence_ms / 1000
        finally:
            self._answers.pop(request.read, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # read here: sending may have failed first
        if response.refusal == worker_pb2.READ_REFUSAL_LEASE:
            raise PermissionDeniedError(response.reason)
        if response.refusal:
            raise InvalidRequestError(response.reason)
        return response

    def give_up(self, read: int) -> None:
        """Let the worker know that none of a read's copies is under way any more, and none follows."""
        if not self.is_over:
            self._start(self._state(worker_pb2.ReadMappedPagesRequest(read=read, ends=True)))

    def go_on(self, read: int) -> None:
        """Let the worker know that copies of a read are still under way."""
        if not self.is_over:
            self._start(self._state(worker_pb2.ReadMappedPagesRequest(read=read, goes_on=True)))

    def close(self) -> None:
        """End the call, and with it all reads."""
        self.is_over = True
        self._call.cancel()

    def _start(self, action: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request: worker_pb2.ReadMappedPagesRequest) -> None:
        async with self._sending:
            try:
                await self._call.write(request)
            except asyncio.InvalidStateError as error:
                raise SharingError("the call for reads has ended") from error

    async def _state(self, request: worker_pb2.ReadMappedPagesRequest) -> None:
        """Send a request that has no answer. If the call has ended, the worker notices."""
        with contextlib.suppress(grpc.aio.AioRpcError, SharingError):
            await self._send(request)

    async def _receive(self) -> None:
        """Hand responses to those who wait for them, until the call ends."""
        failure: Exception = SharingError("the worker has ended the call for reads")
        try:
            while isinstance(response := await self._call.read(), worker_pb2.ReadMappedPagesResponse):
                answer = self._answers.get(response.read)
                if answer is not None and not answer.done():
                    answer.set_result(response)
        except grpc.aio.AioRpcError as error:
            failure = error
        except asyncio.CancelledError:
            # Also if the channel was closed.
            failure = SharingError("the call for reads was closed")
            raise
        finally:
            self.is_over = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(failure)
