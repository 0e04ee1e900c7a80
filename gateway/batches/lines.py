"""The lines of a batch: their form, what is refused in them, and the lines of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Json: TypeAlias = dict[str, Any]  # Any: free JSON

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/v1/pooling",
    "/v2/embed",
    "/v2/rerank",
    "/generate",
)
# Fields of a body that lines may not set to a true value, with the reason.
REFUSED_FIELDS: Final = {
    "stream": "the output file has whole responses",
    "background": "a batch is in the background itself",
    "session_id": "a session keeps memory while its next turn is awaited, and lines have no order",
    "session_params": "a session keeps memory while its next turn is awaited, and lines have no order",
    "priority": "all lines have the lowest class",
}
MAX_CUSTOM_ID: Final = 512
MAX_ERRORS: Final = 100


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line; `index` counts from 0 and leaves out empty lines."""

    index: int
    custom_id: str
    body: Json


class BatchLineError(Exception):
    """A line is refused; the fields are those of OpenAI's batch errors."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


async def split_lines(content: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """Yield the lines of `content` that are not empty; of lines longer than `limit` bytes only the beginning."""
    rest = bytearray()
    async for piece in content:
        first, *others = piece.split(b"\n")
        rest += first[: max(limit + 1 - len(rest), 0)]
        for line in others:
            if rest.strip():
                yield bytes(rest)
            rest = bytearray(line[: limit + 1])
    if rest.strip():
        yield bytes(rest)


def parse_line(raw: bytes, index: int, endpoint: str, limit: int) -> BatchLine:
    """Parse a line of a batch for `endpoint`, of up to `limit` bytes.

    Raises:
        BatchLineError: it is refused.
    """
    if len(raw) > limit:
        raise BatchLineError("line_too_large", f"The line is larger than the limit of {limit} bytes.")
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BatchLineError("invalid_json_line", "The line is not valid JSON.") from error
    if not isinstance(line, dict):
        raise BatchLineError("invalid_json_line", "The line is not a JSON object.")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > MAX_CUSTOM_ID:
        raise BatchLineError(
            "invalid_request", f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID} characters.", "custom_id"
        )
    if line.get("method") != "POST":
        raise BatchLineError("invalid_request", "'method' must be POST.", "method")
    if line.get("url") != endpoint:
        raise BatchLineError("mismatched_endpoint", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    if not isinstance(body, dict):
        raise BatchLineError("invalid_request", "'body' must be a JSON object.", "body")
    for field, reason in REFUSED_FIELDS.items():
        if body.get(field):
            raise BatchLineError(
                "invalid_request", f"'{field}' is not supported in batches: {reason}.", f"body.{field}"
            )
    return BatchLine(index, custom_id, body)


def answered(batch_id: str, line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """Return the output line of a response."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": parsed}
    return _output(batch_id, line, response, None)


def unanswered(batch_id: str, line: BatchLine, code: str, message: str) -> bytes:
    """Return the output line of a request that has no response."""
    return _output(batch_id, line, None, {"code": code, "message": message})


def _output(batch_id: str, line: BatchLine, response: Json | None, error: Json | None) -> bytes:
    request = f"batch_req_{batch_id.removeprefix('batch_')}_{line.index}"
    output = {"id": request, "custom_id": line.custom_id, "response": response, "error": error}
    return orjson.dumps(output, option=orjson.OPT_APPEND_NEWLINE)
