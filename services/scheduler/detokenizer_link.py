"""The stream to one detokenizer, with values instead of protobuf messages as its interface."""

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


class DetokenizerLinkListener(Protocol):
    """Receives the events of all links. The calls run on the event loop."""

    def on_outlet_connected(self) -> None:
        """Output can be sent to another detokenizer."""

    def on_outlet_broken(self, process: str | None) -> None:
        """The stream to the detokenizer `process` has broken, and with it every choice that was sent to it.

        None: the only detokenizer, which has no name.
        """

    def on_choices_ended(self, ended: Iterable[EndedChoice]) -> None:
        """A detokenizer has ended these choices."""

    @property
    def has_others(self) -> bool:
        """Whether another group would serve the requests of this one."""


class LinkOwner(Protocol):
    """Receives the events of its links."""

    def on_connected(self) -> None:
        """A link is open."""

    def on_broken(self, link: DetokenizerLink) -> None:
        """A link has broken."""

    def on_ended(self, ended: Iterable[EndedChoice]) -> None:
        """A detokenizer has ended choices."""

    @property
    def has_others(self) -> bool:
        """Whether another group would serve the requests of this one."""


class DetokenizerLink:
    """Sends output to one detokenizer, and reports the choices that it ends."""

    def __init__(self, channel: grpc.aio.Channel, owner: LinkOwner) -> None:
        """Prepare a stream on `channel`; `run` opens it, and closes both."""
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        self._channel = channel
        self._owner = owner
        self._scheduler_id = secrets.token_hex(8)
        self._link: StreamLink[detokenizer_pb2.PushRequest, detokenizer_pb2.PushResponse] = StreamLink(
            "detokenizer",
            StreamSource(
                lambda: stub.Push(),
                lambda: detokenizer_pb2.PushRequest(heartbeat=True),
                lambda: renew(channel),
                lambda: owner.has_others,
            ),
            lambda message: owner.on_ended(ended_from_wire(message)),
            on_connected=self._on_connected,
            on_disconnected=lambda _reason: owner.on_broken(self),
        )

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open."""
        return self._link.connected

    @property
    def process(self) -> str | None:
        """The name of the detokenizer's process; None if it has none, or before the first connection."""
        return self._link.process

    def send(self, output: Output, weight_version: str) -> None:
        """Queue output, whose tokens were computed with the weights called `weight_version`.

        Raises:
            UnavailableError: the detokenizer is unreachable, or does not keep up.
        """
        message = output_to_wire(output)
        message.weight_version = weight_version
        self._link.send(message)

    def _on_connected(self) -> None:
        # An earlier stream may still be open at the detokenizer, if the connection broke on this side only.
        self._link.send(detokenizer_pb2.PushRequest(scheduler_id=self._scheduler_id))
        self._owner.on_connected()

    async def run(self) -> None:
        """Keep the stream open until cancelled; then close the channel."""
        try:
            await self._link.run()
        finally:
            await self._channel.close()
