"""Routes whose endpoints declare a request body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from fastapi.routing import APIRoute

from gateway.endpoints.schema import parse
from gateway.server.body import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from fastapi import Request, Response
    from fastapi.dependencies.models import Dependant

    from gateway.endpoints.schema import Schema

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]


# The response of a route that can stream, in the OpenAPI description.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {}}}}}


def body_route(max_body_bytes: int) -> type[APIRoute]:
    """Return the class of the routes of an application whose request bodies may have `max_body_bytes` bytes.

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
            return _handler(self.dependant, max_body_bytes)

    return BodyRoute


def _handler(dependant: Dependant, max_body_bytes: int) -> Handler:
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

    async def handle(request: Request) -> Response:
        arguments: dict[str, Any] = {} if request_name is None else {request_name: request}
        for name, dependency in dependencies:
            arguments[name] = await dependency(request)
        raw = await read_object(request, max_body_bytes)
        schema = choose(schemas, raw)
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
