"""Delivery of responses that take long to render."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.endpoints.shapes import WholeChoice, collect

if TYPE_CHECKING:
    from starlette.types import Send

    from gateway.endpoints.shapes import PiecewiseRenderer
    from gateway.generation.generation import Generation

# The event loop gets control after rendering this much, which takes a few milliseconds.
PIECE_BYTES = 256 * 1024


class PiecewiseDelivery:
    """Collects all updates, renders them piecewise so that other tasks can run in between, and sends one body."""

    def __init__(self, renderer: PiecewiseRenderer) -> None:
        self._renderer = renderer

    async def deliver(self, generation: Generation, send: Send) -> None:
        """Wait for the end of all choices and send them; see `Delivery`."""
        choices = [WholeChoice() for entry in generation.entries for _ in entry.choices]
        while (updates := await generation.next_updates()) is None or updates:
            collect(updates or (), choices)
        pieces, written = [], 0
        for piece in self._renderer.pieces(choices, generation.usage):
            pieces.append(piece)
            written += len(piece)
            if written > PIECE_BYTES:
                written = 0
                await asyncio.sleep(0)
        body = b"".join(pieces)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
