"""Images that this process encodes for the ranks of a group, and their embeddings until the ranks have read them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError, PermissionDeniedError
from common.logs import get_logger
from services.worker.engine.host_tier.shared_pages import SharingError
from services.worker.peers.leases import LEASE_BYTES, MESSAGE_BYTES
from services.worker.peers.sealed_memory import SealedMemory, SealedPlace, sharing_space

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from common.types import RowImage

    Encode = Callable[[Sequence[RowImage]], Awaitable[Sequence[bytes | memoryview]]]

# Images that are encoded together; more would make the first one wait longer, and hardly be faster.
MOST_AT_ONCE = 8
# Images whose embeddings are in memory that others may open; each takes a descriptor, and further ones are sent.
MOST_SHARED = 64


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An image whose call waits until `done`."""

    ticket: bytes
    image: RowImage
    done: asyncio.Future[None]


class EncodingQueue:
    """Owns the waiting images and the embeddings that can be read. All methods belong to the event loop.

    Images are encoded in the order in which they come, those together that wait at the same time. The scheduler bounds
    their number.
    """

    def __init__(self, encode: Encode) -> None:
        """Encode with `encode`, one call after the other."""
        self._encode = encode
        self._waiting: deque[_Waiting] = deque()
        # Kept, as a task that only its loop refers to may be collected.
        self._encoding: asyncio.Task[None] | None = None
        # Those of all calls, and what can be read under some of them.
        self._tickets: set[bytes] = set()
        self._held: dict[bytes, bytes | SealedMemory] = {}
        self._has_warned = False
        self._log = get_logger("encodings")

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
        if len(ticket) != LEASE_BYTES or ticket in self._tickets:
            raise InvalidRequestError(f"a ticket has {LEASE_BYTES} bytes, and is used once", param="ticket")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tickets.add(ticket)
        try:
            self._waiting.append(_Waiting(ticket, image, done))
            if self._encoding is None or self._encoding.done():
                self._encoding = asyncio.create_task(self._encode_waiting())
            await done
            yield
        finally:
            self._tickets.remove(ticket)
            held = self._held.pop(ticket, None)
            if isinstance(held, SealedMemory):
                held.close()

    def read(self, ticket: bytes, space: str = "") -> Iterator[bytes | SealedPlace]:
        """Return embeddings, in parts that fit into messages, or where a reader in `space` finds them.

        Raises:
            PermissionDeniedError: there are none.
        """
        held = self._held.get(ticket)
        if held is None:
            raise PermissionDeniedError("there are no embeddings with this ticket; its call may have ended")
        if isinstance(held, bytes):
            return (held[first : first + MESSAGE_BYTES] for first in range(0, len(held), MESSAGE_BYTES))
        if space and space == sharing_space():
            return iter((held.place,))
        return held.parts(MESSAGE_BYTES)

    async def _encode_waiting(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
            # Callers that have gone away cancelled theirs.
            batch = [each for each in batch if not each.done.done()]
            if not batch:
                continue
            try:
                encoded = await self._encode([each.image for each in batch])
                kept = await asyncio.to_thread(self._keep, encoded)
            except Exception as error:  # noqa: BLE001  (raised again in the callers)
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(error)
                continue
            for each, content in zip(batch, kept, strict=True):
                if not each.done.done():
                    self._held[each.ticket] = content
                    each.done.set_result(None)
                elif isinstance(content, SealedMemory):
                    content.close()

    def _keep(self, encoded: Sequence[bytes | memoryview]) -> list[bytes | SealedMemory]:
        """Copy embeddings into memory that others may open, as far as there is such memory."""
        kept: list[bytes | SealedMemory] = []
        for content in encoded:
            try:
                kept.append(SealedMemory(content) if len(self._held) + len(kept) < MOST_SHARED else bytes(content))
            except SharingError as error:
                kept.append(bytes(content))
                if not self._has_warned:
                    self._has_warned = True
                    self._log.warning("embeddings.not_shared", reason=str(error))
        return kept
