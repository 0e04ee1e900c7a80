"""The OpenAPI description. The gateway parses bodies itself, so FastAPI's description lacks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from fastapi import Request, Response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastapi import FastAPI

    from gateway.endpoints.context import Context
    from gateway.endpoints.schema import Schema

Json = dict[str, Any]  # Any: OpenAPI is free JSON

REFERENCE = "#/components/schemas/{model}"
TEXT = {"type": "string"}
NULLABLE = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": TEXT, "type": TEXT, "param": NULLABLE, "code": NULLABLE},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
FAILURE = {
    "description": "What was wrong, and what would be right",
    "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}},
}
SUCCESS = {
    "description": "The answer",
    "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}, "text/plain": {"schema": {}}},
}


def documented(*bodies: type[Schema]) -> Json:
    """Return the `openapi_extra` of an endpoint that accepts one of `bodies`."""
    references = [{"$ref": REFERENCE.format(model=body.__name__)} for body in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, context: Context, bodies: Iterable[type[Schema]]) -> None:
    """Serve the description at /openapi.json, with `bodies` and the shape of errors, to authenticated callers."""
    generate = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generate(), bodies)
        return app.openapi_schema

    async def description(request: Request) -> Response:
        await context.caller(request)
        return Response(orjson.dumps(app.openapi()), media_type="application/json")

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own documentation does it
    app.add_api_route("/openapi.json", description, methods=["GET"], include_in_schema=False)


def _completed(description: Json, bodies: Iterable[type[Schema]]) -> Json:
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    schemas.clear()  # FastAPI's error shapes do not apply.
    schemas["Error"] = ERROR
    for body in bodies:
        schema = body.model_json_schema(ref_template=REFERENCE)
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
    for operations in description["paths"].values():
        for operation in operations.values():
            operation["responses"] = {"200": SUCCESS, "4XX": FAILURE, "503": FAILURE}
    return description
