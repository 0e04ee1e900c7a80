"""Request schemas for the generated API description; bodies are read by our own code, so FastAPI does not see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.schemas.parse import Schema


def documented(*bodies: type[Schema]) -> dict[str, Any]:  # Any: OpenAPI is free JSON
    """Return the `openapi_extra` of an endpoint that accepts one of `bodies`."""
    schemas = [
        body.model_json_schema(ref_template=f"#/components/schemas/{body.__name__}/$defs/{{model}}") for body in bodies
    ]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
