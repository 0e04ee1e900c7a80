"""Errors in the shape of OpenAI's API, with headers that state whether a retry may succeed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from common.errors import HTTP_STATUS, PandoError
from common.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_RETRY_AFTER_MS = 1000
# Statuses that the official clients retry by default; for other 4xx statuses, x-should-retry is not needed.
RETRIED_BY_CLIENTS = frozenset({408, 409, 429})


class ErrorStyle(Enum):
    """The API whose clients read an error: OpenAI's fields alone, or with others beside or in place of them."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    COHERE = "cohere"
    TEI = "tei"


# For errors before a request's body is known, by the beginning of its path.
_STYLES = {
    "/v1/messages": ErrorStyle.ANTHROPIC,
    "/v2/": ErrorStyle.COHERE,
    "/embed": ErrorStyle.TEI,
    "/predict": ErrorStyle.TEI,
    "/info": ErrorStyle.TEI,
}
# `error_type` of Text Embeddings Inference, by HTTP status; others are "validation".
_TEI_TYPES = {429: "overloaded", 503: "unhealthy", 500: "backend"}


def style_of(path: str) -> ErrorStyle:
    """Return the style of the errors at a path."""
    return next((style for prefix, style in _STYLES.items() if path.startswith(prefix)), ErrorStyle.OPENAI)


def styled(status: int, body: bytes, style: ErrorStyle) -> bytes:
    """Return an error body in a style: OpenAI's `error` object stays where the style has no field of this name."""
    match style:
        case ErrorStyle.ANTHROPIC:
            return b'{"type":"error",' + body[1:]
        case ErrorStyle.COHERE:
            message = orjson.loads(body)["error"]["message"]
            return b'{"message":' + orjson.dumps(message) + b"," + body[1:]
        case ErrorStyle.TEI:
            message = orjson.loads(body)["error"]["message"]
            return orjson.dumps({"error": message, "error_type": _TEI_TYPES.get(status, "validation")})
        case ErrorStyle.OPENAI:
            return body


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """`error.type` and `error.code` of an error body."""

    type: str
    code: str | None


SHAPES: dict[ErrorCode, ErrorShape] = {
    ErrorCode.INVALID_REQUEST: ErrorShape("invalid_request_error", None),
    ErrorCode.MODEL_NOT_FOUND: ErrorShape("invalid_request_error", "model_not_found"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorShape("invalid_request_error", "context_length_exceeded"),
    ErrorCode.QUEUE_FULL: ErrorShape("rate_limit_error", "rate_limit_exceeded"),
    ErrorCode.TIMEOUT: ErrorShape("timeout_error", "timeout"),
    ErrorCode.UNAVAILABLE: ErrorShape("service_unavailable_error", "service_unavailable"),
    ErrorCode.INTERNAL: ErrorShape("server_error", "internal_error"),
    ErrorCode.UNAUTHENTICATED: ErrorShape("invalid_request_error", "invalid_api_key"),
    ErrorCode.PERMISSION_DENIED: ErrorShape("permission_error", "permission_denied"),
    ErrorCode.OUT_OF_MEMORY: ErrorShape("service_unavailable_error", "out_of_memory"),
}
HTTP_SHAPES: dict[int, ErrorShape] = {
    404: ErrorShape("invalid_request_error", "unknown_url"),
    408: ErrorShape("invalid_request_error", "request_timeout"),
    405: ErrorShape("invalid_request_error", "method_not_allowed"),
    413: ErrorShape("invalid_request_error", "request_too_large"),
    415: ErrorShape("invalid_request_error", "unsupported_media_type"),
}
TEXT = {"type": "string"}
NULLABLE_TEXT = {"type": ["string", "null"]}
# The JSON schema of the bodies that `error_body` returns.
ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": TEXT, "type": TEXT, "param": NULLABLE_TEXT, "code": NULLABLE_TEXT},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


class HttpError(Exception):
    """An error without an error code in the pipeline, such as 413, 415 or the 404 of an unknown path."""

    def __init__(
        self, status: int, message: str, *, close: bool = False, headers: Mapping[str, str] | None = None
    ) -> None:
        """`close` closes the connection after the response, because the rest of the request's body is not read."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.close = close
        self.headers = headers


def error_body(message: str, shape: ErrorShape, param: str | None = None) -> bytes:
    """Return the JSON body of an error; all four keys are always present."""
    error = {"message": message, "type": shape.type, "param": param, "code": shape.code}
    return orjson.dumps({"error": error})


def error_event(error: PandoError) -> bytes:
    """Return the JSON of an error inside a stream."""
    shape = SHAPES[error.code] if error.reason is None else ErrorShape(error.reason, error.reason)
    return error_body(error.message, shape, error.param)


def error_response(error: PandoError) -> Response:
    """Return the HTTP response for `error`, with headers about retries."""
    status = HTTP_STATUS[error.code]
    return json_error(status, error_event(error), _retry_headers(status, error))


def http_error_response(error: HttpError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP response for an `HttpError`."""
    shape = HTTP_SHAPES.get(error.status, SHAPES[ErrorCode.INVALID_REQUEST])
    sent = dict(headers or {})
    if error.close:
        sent["connection"] = "close"
    return json_error(error.status, error_body(error.message, shape), sent)


def internal_error_response() -> Response:
    """Return the response for a defect of the gateway; the log has its cause, under the request's id."""
    body = error_body("The server had an internal error; its log knows the cause.", SHAPES[ErrorCode.INTERNAL])
    return json_error(500, body, {"x-should-retry": "false"})


def json_error(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    """Return `body` as JSON with `status`."""
    return Response(body, status, headers=dict(headers), media_type="application/json")


def _retry_headers(status: int, error: PandoError) -> dict[str, str]:
    headers: dict[str, Any] = {}
    if status in RETRIED_BY_CLIENTS or status >= 500:
        headers["x-should-retry"] = "true" if error.retryable else "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retryable and status in (429, 503):
        wait_ms = DEFAULT_RETRY_AFTER_MS if error.retry_after_ms is None else error.retry_after_ms
        headers["retry-after"] = str(max(1, math.ceil(wait_ms / 1000)))
        headers["retry-after-ms"] = str(wait_ms)
    return headers
