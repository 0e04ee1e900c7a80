"""Images that this process encodes for the ranks of a group, and their embeddings until the ranks have read them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError, PermissionDeniedError
from services.worker.peers.leases import LEASE_BYTES, MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from common.types import RowImage

    Encode = Callable[[Sequence[RowImage]], Awaitable[list[bytes]]]

# Images that are encoded together; more would make the first one wait longer, and hardly be faster.
MOST_AT_ONCE = 8


class EncodingQueue:
    """Owns the waiting images and the embeddings that can be read. All methods belong to the event loop.

    Images are encoded in the order in which they come, those together that wait at the same time. The scheduler bounds
    their number.
    """

    def __init__(self, encode: Encode) -> None:
        """Encode with `encode`, one call after the other."""
        self._encode = encode
        self._waiting: deque[tuple[RowImage, asyncio.Future[bytes]]] = deque()
        # Kept, as a task that only its loop refers to may be collected.
        self._encoding: asyncio.Task[None] | None = None
        self._held: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        """Return the number of images whose embeddings can be read."""
        return len(self._held)

    @contextlib.asynccontextmanager
    async def hold(self, ticket: bytes, image: RowImage) -> AsyncIterator[None]:
        """Encode an image; within the context, its embeddings can be read under `ticket`.

        Raises:
            InvalidRequestError: the ticket is invalid or in use.
            Exception: what kept the image from being encoded.
        """
        if len(ticket) != LEASE_BYTES or ticket in self._held:
            raise InvalidRequestError(f"a ticket has {LEASE_BYTES} bytes, and is used once", param="ticket")
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((image, done))
        if self._encoding is None or self._encoding.done():
            self._encoding = asyncio.create_task(self._encode_waiting())
        self._held[ticket] = await done
        try:
            yield
        finally:
            del self._held[ticket]

    def read(self, ticket: bytes) -> Iterator[bytes]:
        """Return the embeddings under a ticket, in parts that fit into messages.

        Raises:
            PermissionDeniedError: there are none.
        """
        content = self._held.get(ticket)
        if content is None:
            raise PermissionDeniedError("there are no embeddings with this ticket; its call may have ended")
        return (content[first : first + MESSAGE_BYTES] for first in range(0, len(content), MESSAGE_BYTES))

    async def _encode_waiting(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
            # Callers that have gone away cancelled theirs.
            batch = [(image, done) for image, done in batch if not done.done()]
            if not batch:
                continue
            try:
                encoded = await self._encode([image for image, _ in batch])
            except Exception as error:  # noqa: BLE001  (raised again in the callers)
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
                continue
            for (_, done), content in zip(batch, encoded, strict=True):
                if not done.done():
                    done.set_result(content)
