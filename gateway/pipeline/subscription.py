"""The stream from the detokenizer with the output of all requests."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import grpc

from common.logs import get_logger
from common.rpc.acceptance import wait_until_accepted
from common.rpc.reconnect import RefusalLog, keep_connecting
from common.rpc.stream import CLOSED_HERE
from common.types import SubscriberId
from gateway.pipeline.wire import delta_from_wire
from protos.gen.pando.v1 import detokenizer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.deltas import Delta
    from protos.gen.pando.v1 import detokenizer_pb2_grpc


class Subscription:
    """Keeps one subscription at the detokenizer open, under a fresh id each time.

    An id belongs to one subscription only: requests submitted under an earlier one were reported as lost when it broke.
    The callbacks run on the event loop and must not block.
    """

    def __init__(
        self,
        stub: detokenizer_pb2_grpc.DetokenizerAsyncStub,
        on_delta: Callable[[Delta], None],
        on_connected: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """The subscription starts with `run`."""
        self.subscriber_id: SubscriberId | None = None
        self._stub = stub
        self._on_delta = on_delta
        self._on_connected = on_connected
        self._on_broken = on_broken
        self._refusals = RefusalLog("detokenizer")
        self._log = get_logger("subscription")

    async def run(self) -> None:
        """Subscribe, and again after every failure, until cancelled."""
        await keep_connecting(self._run_once)

    async def _run_once(self) -> bool:
        """Subscribe and receive until the stream breaks; return whether it was connected."""
        subscriber_id = SubscriberId(f"gateway-{secrets.token_hex(16)}")
        call = self._stub.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id=subscriber_id))
        reason = CLOSED_HERE
        try:
            await wait_until_accepted(call)
            self.subscriber_id = subscriber_id
            self._refusals.clear()
            self._log.info("subscription.connected", subscriber_id=subscriber_id)
            self._on_connected()
            async for message in call:
                for delta in message.deltas:
                    self._on_delta(delta_from_wire(delta))
            reason = "closed by the peer"
        except grpc.RpcError as error:
            reason = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
            self._refusals.note(error)
        finally:
            was_connected, self.subscriber_id = self.subscriber_id is not None, None
            call.cancel()
            if was_connected:
                log = self._log.info if reason is CLOSED_HERE else self._log.warning
                log("subscription.broken", subscriber_id=subscriber_id, reason=reason)
                self._on_broken(reason)
        return was_connected
