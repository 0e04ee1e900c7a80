"""The stream to the detokenizer, with values instead of protobuf messages as its interface."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from common.rpc.channel import renew
from common.rpc.stream import StreamLink, StreamSource
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.scheduler.wire.requests import ended_from_wire, output_to_wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc

    from services.scheduler.core.output import EndedChoice, Output


class DetokenizerListener(Protocol):
    """Receives the link's events. The calls run on the event loop."""

    def on_outlet_connected(self) -> None:
        """Output can be sent."""

    def on_outlet_broken(self) -> None:
        """The stream has broken, and with it every choice that was sent to it."""

    def on_choices_ended(self, ended: Iterable[EndedChoice]) -> None:
        """The detokenizer has ended these choices."""


class DetokenizerLink:
    """Sends output, and reports the choices that the detokenizer ends to the listener."""

    def __init__(self, channel: grpc.aio.Channel, listener: DetokenizerListener) -> None:
        """Prepare a stream on `channel`; `run` opens it."""
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        self._listener = listener
        self._scheduler_id = secrets.token_hex(8)
        self._link: StreamLink[detokenizer_pb2.PushRequest, detokenizer_pb2.PushResponse] = StreamLink(
            "detokenizer",
            StreamSource(
                lambda: stub.Push(),
                lambda: detokenizer_pb2.PushRequest(heartbeat=True),
                lambda: renew(channel),
            ),
            lambda message: listener.on_choices_ended(ended_from_wire(message)),
            on_connected=self._on_connected,
            on_disconnected=lambda _reason: listener.on_outlet_broken(),
        )

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open."""
        return self._link.connected

    def send(self, output: Output) -> None:
        """Queue output.

        Raises:
            UnavailableError: the detokenizer is unreachable, or does not keep up.
        """
        self._link.send(output_to_wire(output))

    def _on_connected(self) -> None:
        # An earlier stream may still be open at the detokenizer, if the connection broke on this side only.
        self._link.send(detokenizer_pb2.PushRequest(scheduler_id=self._scheduler_id))
        self._listener.on_outlet_connected()

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        await self._link.run()
