"""Clients of recorded answers: they read a part of a stream, leave, and continue it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from tests.gateway.support import HELLO

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": HELLO,
    "stream": True,
    "stream_options": {"include_usage": True},
}
DONE = "[DONE]"


@dataclass
class Seen:
    """What a client has received of a stream, over all its connections."""

    ids: list[str] = field(default_factory=list)
    datas: list[str] = field(default_factory=list)

    @property
    def last_id(self) -> str:
        return self.ids[-1]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the events."""
        return [int(each.rpartition("/")[2].partition(".")[0]) for each in self.ids]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.datas if data != DONE]

    @property
    def text(self) -> str:
        """The text of a chat, of completions, of a response or of a message."""
        parts = []
        for chunk in self.chunks:
            choices = chunk.get("choices", ())
            parts += [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
            if chunk.get("type") in ("response.output_text.delta", "content_block_delta"):
                delta = chunk["delta"]
                parts.append(delta if isinstance(delta, str) else delta.get("text", ""))
        return "".join(parts)

    @property
    def usage(self) -> dict[str, Any]:
        [usage] = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return dict(usage)

    def add(self, event: str) -> None:
        for line in event.splitlines():
            name, _, value = line.partition(": ")
            if name == "id":
                self.ids.append(value)
            elif name == "data":
                self.datas.append(value)


async def read(
    port: int,
    seen: Seen,
    *,
    path: str = CHAT,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    events: int | None = None,
) -> httpx.Response:
    """Add the next `events` events (None: all) of a stream to `seen`, then close the connection.

    With events in `seen`, the stream is continued after the last one. Without a body, by GET.
    """
    own = dict(headers or {}) | ({"last-event-id": seen.last_id} if seen.ids else {})
    method = "GET" if body is None else "POST"
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        client.stream(method, f"http://127.0.0.1:{port}{path}", json=body, headers=own) as response,
    ):
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return response
        async for event in _events(response):
            seen.add(event)
            if events is not None:
                events -= 1
                if events == 0:
                    break
    return response


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    waiting = ""
    async for text in response.aiter_text():
        *complete, waiting = (waiting + text).split("\n\n")
        for event in complete:
            yield event
