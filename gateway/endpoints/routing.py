"""Routes whose endpoints declare a request body: how it is read, bounded in size and time, and validated."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, get_args

import orjson
from fastapi.routing import APIRoute

from common.errors import InvalidRequestError
from gateway.endpoints.schema import parse
from gateway.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from fastapi import Request, Response
    from fastapi.dependencies.models import Dependant

    from gateway.endpoints.schema import Schema

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]
    # Returns the bytes that a body with images may have; 0: no model takes images.
    ImageRoom = Callable[[], Coroutine[Any, Any, int]]
    from starlette.requests import Request
    from starlette.types import Receive

# The response of a route that can stream, in the OpenAPI description.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {}}}}}
# A client that receives "too large" while it is still sending often sees only a broken connection. So up to this much
# of the rest is read and discarded first.
DISCARD_BYTES = 32 * 1024 * 1024
DISCARD_S = 2.0
# The key of a request's error style in its scope.
ERROR_STYLE = "pando.error_style"
# The key of a request's body, as it was parsed, in its scope.
BODY = "pando.body"
# Longest pause between two chunks of a body, and longest time for the whole body.
PAUSE_S = 30.0
BODY_S = 300.0


def body_route(max_body_bytes: int, with_images: ImageRoom) -> type[APIRoute]:
    """Return the class of the routes of an application whose request bodies may have `max_body_bytes` bytes.

    Bodies that may have images may have the bytes that `with_images` returns, if it returns any.

    An endpoint declares its dependencies and its body, a `Schema` or a union of several, in the way of FastAPI, which
    describes the body in its OpenAPI description. Routes with a body differ from FastAPI's own in how they handle a
    request:

    - Dependencies run before the body is read, in their order, so that a caller without a valid credential cannot make
      the gateway read or parse anything. FastAPI reads and parses the whole body first.
    - `read_object` limits the body's size and time while it arrives, and parses it with orjson.
    - FastAPI's search for the values of parameters is left out. It took a seventh of the gateway's time until a request
      was submitted.
    """

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            if not self.dependant.body_params:
                return super().get_route_handler()
            return _handler(self.dependant, max_body_bytes, with_images)

    return BodyRoute


def _handler(dependant: Dependant, max_body_bytes: int, with_images: ImageRoom) -> Handler:
    [body] = dependant.body_params
    endpoint, request_name = dependant.call, dependant.request_param_name
    assert endpoint is not None
    assert not [*dependant.path_params, *dependant.query_params], "an endpoint with a body has no other parameters"
    dependencies: list[tuple[str, Handler]] = []
    for each in dependant.dependencies:
        assert each.name is not None, "dependencies are declared in the endpoint's signature"
        assert each.call is not None
        dependencies.append((each.name, each.call))
    annotation = body.field_info.annotation
    schemas: Sequence[type[Schema]] = get_args(annotation) or (annotation,)
    larger = with_images if any(schema.takes_images for schema in schemas) else None

    async def handle(request: Request) -> Response:
        arguments: dict[str, Any] = {} if request_name is None else {request_name: request}
        for name, dependency in dependencies:
            arguments[name] = await dependency(request)
        raw = await read_object(request, max_body_bytes, larger)
        schema = choose(schemas, raw)
        request.scope[ERROR_STYLE] = schema.errors
        request.scope[BODY] = raw
        schema.refuse_unsupported(raw)
        arguments[body.name] = parse(schema, raw)
        response: Response = await endpoint(**arguments)
        return response

    return handle


def choose(schemas: Sequence[type[Schema]], raw: Mapping[str, object]) -> type[Schema]:
    """Return the first of `schemas` whose required fields are all in `raw`, or the last one."""
    for schema in schemas[:-1]:
        if all(name in raw for name, field in schema.model_fields.items() if field.is_required()):
            return schema
    return schemas[-1]


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


async def read_object(request: Request, limit: int, larger: ImageRoom | None = None) -> dict[str, object]:
    """Return the JSON object in the body, which may have up to `limit` bytes, or else what `larger` returns.

    Raises:
        HttpError: the body is too large, arrives too slowly, or its content type or encoding is not supported.
        InvalidRequestError: the body is not a JSON object.
        ClientGoneError: the client disconnected.
    """
    _check_headers(request)
    body = await _read(request, limit, larger)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        reason = str(error) if body else "it is empty"
        raise InvalidRequestError(f"The request body is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    return value


def _check_headers(request: Request) -> None:
    # Clients that are not browsers may omit the content type. Pages may not: application/json makes a browser send a
    # preflight request first, which the gateway does not grant to foreign origins.
    unnamed = "" if "origin" in request.headers else "application/json"
    content_type = request.headers.get("content-type", unnamed).partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HttpError(415, f"Content type {content_type!r} is not supported; send application/json.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HttpError(415, f"Content encoding {encoding!r} is not supported; send the body uncompressed.")


async def _read(request: Request, limit: int, larger: ImageRoom | None) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit and larger is not None:
        limit = max(limit, await larger())
    if announced.isdecimal() and int(announced) > limit:
        # With "Expect: 100-continue" the client waits before it uploads; an immediate answer saves it the upload.
        if "expect" not in request.headers:
            await _discard(request.receive)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    more = True
    deadline = asyncio.get_running_loop().time() + BODY_S
    while more:
        try:
            async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + PAUSE_S)):
                message = await request.receive()
        except TimeoutError:
            raise HttpError(408, "The end of the request body did not arrive in time.", close=True) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > limit and larger is not None and not announced:
            limit, larger = max(limit, await larger()), None
        if size > limit:
            chunks.clear()
            if more:
                await _discard(request.receive)
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def _discard(receive: Receive) -> None:
    """Read and discard the rest of the body, up to DISCARD_BYTES and DISCARD_S."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The request body is larger than the limit of {limit} bytes.", close=True)
