"""Parser of server-sent events as OpenAI-compatible servers send them: one line of data per event."""

from __future__ import annotations

DONE = b"[DONE]"


class EventSplitter:
    """Splits a body that arrives in arbitrary pieces into the payloads of its `data:` lines.

    Other fields and comments are skipped. llama-server may report failures on an `error:` line; its payload is returned
    like data, because it is also a JSON object with the key `error`.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [payload for line in lines if (payload := _payload(line))]


def _payload(line: bytes) -> bytes:
    field, _, value = line.partition(b":")
    return value.strip() if field in (b"data", b"error") else b""
