"""The stream to one tokenizer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from common.recent_images import KeptElsewhere
from common.rpc.channel import is_serving, renew
from common.rpc.peers import Health
from common.rpc.status import answered
from common.rpc.stream import StreamLink, StreamSource
from protos.gen.pando.v1 import tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc

    from common.types import RequestId

TOKENIZER = "tokenizer"
SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name
FIND_TIMEOUT_S = 2.0


class TokenizerListener(Protocol):
    """Receives the events of the streams to tokenizers. Called on the event loop; must not block."""

    def on_response(self, message: tokenizer_pb2.TokenizerSubmitResponse) -> None:
        """A tokenizer has sent admissions."""

    def on_tokenizer_connected(self) -> None:
        """A stream is open."""

    def on_tokenizer_broken(self, tokenizer: TokenizerPeer, reason: str) -> None:
        """A stream has broken."""


class TokenizerPeer:
    """One tokenizer process; `pending` are the requests sent to it that it has not answered.

    `kept_images` are the images that it has said it keeps.
    """

    def __init__(self, channel: grpc.aio.Channel, listener: TokenizerListener) -> None:
        """Prepare the stream, which `run` opens on `channel`, and closes with it."""
        self.channel = channel
        self.pending: set[RequestId] = set()
        self.kept_images = KeptElsewhere()
        self._listener = listener
        self._stub = stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        self._health = Health(channel, SERVICE)
        self._link: StreamLink[tokenizer_pb2.TokenizerSubmitRequest, tokenizer_pb2.TokenizerSubmitResponse]
        self._link = StreamLink(
            TOKENIZER,
            StreamSource(
                lambda: stub.Submit(),
                lambda: tokenizer_pb2.TokenizerSubmitRequest(heartbeat=True),
                lambda: renew(channel),
            ),
            listener.on_response,
            on_connected=listener.on_tokenizer_connected,
            on_disconnected=self._on_disconnected,
        )

    def _on_disconnected(self, reason: str) -> None:
        self.kept_images.clear()
        self._listener.on_tokenizer_broken(self, reason)

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open."""
        return self._link.connected

    @property
    def is_preferred(self) -> bool:
        """Whether it would serve requests, by its latest report."""
        return self._health.is_serving

    @property
    def load(self) -> int:
        """Number of requests that wait for their admission."""
        return len(self.pending)

    async def is_serving(self) -> bool:
        """Ask it whether it would serve requests."""
        return await is_serving(self.channel, SERVICE)

    def send(self, message: tokenizer_pb2.TokenizerSubmitRequest) -> None:
        """Queue a message.

        Raises:
            UnavailableError: the stream is not open, or the tokenizer does not keep up.
        """
        self._link.send(message)

    async def find_unknown(self, asked: Iterable[RequestId]) -> Iterable[str]:
        """Return those of the requests that do not wait for their admission there.

        Raises:
            PandoError: the tokenizer cannot answer.
        """
        request = tokenizer_pb2.FindUnadmittedRequest(request_ids=asked)
        return (await answered(self._stub.FindUnadmitted(request, timeout=FIND_TIMEOUT_S))).request_ids

    async def run(self) -> None:
        """Keep the stream open until cancelled; then close the channel."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run())
                tasks.create_task(self._health.run())
                tasks.create_task(self.kept_images.run())
        finally:
            await self.channel.close()
