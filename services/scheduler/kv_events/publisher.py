"""Sends batches over ZeroMQ as vLLM does: a PUB socket, and a ROUTER socket that repeats what a reader missed."""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import islice

import zmq
import zmq.asyncio

from common.errors import ConfigurationError

# Batches that can be repeated.
KEPT_BATCHES = 10_000
# Messages that wait for a slow reader before further ones are dropped for it; it sees a gap in their numbers.
HIGH_WATER_MARK = 100_000
# Ends a repetition.
END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Binds both sockets."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """Bind.

        Raises:
            ConfigurationError: an endpoint is invalid, or in use.
        """
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._next = 0
        self._context = zmq.asyncio.Context()
        self._publishing = self._bind(zmq.PUB, "scheduler.kv_events.endpoint", endpoint)
        self._repeating: zmq.asyncio.Socket | None = None
        if replay_endpoint is not None:
            self._repeating = self._bind(zmq.ROUTER, "scheduler.kv_events.replay_endpoint", replay_endpoint)

    def _bind(self, kind: int, name: str, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigurationError(f"{name}: cannot listen on {endpoint}: {error.strerror}") from error
        return socket

    async def send(self, payload: bytes) -> None:
        """Publish a batch, and keep it."""
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        await self._publishing.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        """Answer readers until cancelled: a request is an empty frame and the first number asked for, 8 bytes."""
        if self._repeating is None:
            return
        while True:
            reader, *request = await self._repeating.recv_multipart()
            if len(request) != 2 or len(request[1]) != len(END):
                continue
            first = int.from_bytes(request[1], "big")
            kept = list(islice(self._kept, max(0, first - (self._next - len(self._kept))), None))
            # A reader that went away is not waited for.
            with contextlib.suppress(zmq.ZMQError):
                for number, payload in kept:
                    await self._repeating.send_multipart([reader, b"", number.to_bytes(8, "big"), payload])
                await self._repeating.send_multipart([reader, b"", END, b""])

    def close(self) -> None:
        """Close the sockets; unsent messages are dropped."""
        self._context.destroy(linger=0)
