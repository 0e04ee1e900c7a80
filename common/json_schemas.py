"""Checks that a JSON schema can be enforced on an output.

A keyword that a grammar cannot enforce is an error that names it; it is never ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_DEPTH = 64
MAX_VALUES = 20_000

Json: TypeAlias = Any  # Any: free JSON
Node: TypeAlias = "Mapping[str, Json]"

# Constraints between parts of a value, and negations.
UNSUPPORTED = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor",
)  # fmt: skip
# Formats that JSON Schema defines but our grammars cannot enforce. By the specification, unknown formats are
# annotations.
UNSUPPORTED_FORMATS = frozenset({"regex", "idn-email", "idn-hostname", "iri", "iri-reference", "uri-template"})
SUPPORTED_FORMATS = frozenset({
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "json-pointer", "relative-json-pointer",
})  # fmt: skip
# Keywords that do not constrain a value.
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable",
    "$comment", "$schema", "$id", "$defs", "definitions", "discriminator",
})  # fmt: skip
# Keywords whose values are not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "example", "required", "discriminator"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")


def check_json_schema(schema: Json, param: str) -> None:
    """Check that a schema can be enforced on outputs.

    Raises:
        InvalidRequestError: it is too large, too deep, or has a constraint that cannot be enforced; named `param`.
    """
    if schema is True:
        return
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"'{param}' should be a JSON schema, an object.", param=param)
    check_size(schema, param)
    for place, node in _nodes(schema, "$"):
        problem = _problem(node)
        if problem is not None:
            raise InvalidRequestError(f"'{param}' cannot be followed: at {place}, {problem}.", param=param)


def check_size(value: Json, param: str) -> None:
    """Check that a JSON value has at most `MAX_DEPTH` levels and `MAX_VALUES` values.

    Raises:
        InvalidRequestError: it has more; named `param`.
    """
    count, level = 0, [value]
    for _ in range(MAX_DEPTH + 1):
        count += len(level)
        if count > MAX_VALUES:
            raise InvalidRequestError(f"'{param}' has more than {MAX_VALUES} values.", param=param)
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return
    raise InvalidRequestError(f"'{param}' is nested more than {MAX_DEPTH} levels deep.", param=param)


def _nodes(schema: Json, place: str) -> Iterator[tuple[str, Node]]:
    """Yield a schema and all schemas within it, each with its JSONPath."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for name, value in schema.items():
        if name in _DATA:
            continue
        if name in _MAPS and isinstance(value, dict):
            for key, inner in value.items():
                yield from _nodes(inner, f"{place}.{name}.{key}"[:200])
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _nodes(inner, f"{place}.{name}[{index}]")
        else:
            yield from _nodes(value, f"{place}.{name}")


def _problem(node: Node) -> str | None:
    """Return the reason why a schema cannot be enforced; schemas within it are not checked."""
    for name in UNSUPPORTED:
        if name in node:
            return f"'{name}' cannot be enforced"
    if node.get("uniqueItems") is True:
        return "'uniqueItems' cannot be enforced"
    if "multipleOf" in node and (not isinstance(node["multipleOf"], int) or any(name in node for name in _BOUNDS)):
        return "'multipleOf' cannot be enforced together with bounds, or if it is not an integer"
    return _problem_of_text(node) or _problem_of_alternatives(node) or _problem_of_properties(node)


def _problem_of_text(node: Node) -> str | None:
    format_ = node.get("format")
    if isinstance(format_, str) and format_ in UNSUPPORTED_FORMATS:
        return f"the format '{format_}' cannot be enforced"
    has_form = "pattern" in node or (isinstance(format_, str) and format_ in SUPPORTED_FORMATS)
    if has_form and ("minLength" in node or "maxLength" in node):
        return "a length cannot be enforced together with a pattern or format"
    if "pattern" in node and isinstance(format_, str) and format_ in SUPPORTED_FORMATS:
        return "a pattern cannot be enforced together with a format"
    return None


def _problem_of_alternatives(node: Node) -> str | None:
    stated = [name for name in _ALTERNATIVES if name in node]
    if not stated:
        return None
    beside = [name for name in node if name not in ANNOTATIONS and name not in stated]
    if len(stated) > 1 or beside:
        return f"'{stated[0]}' cannot be enforced together with {', '.join(repr(n) for n in [*stated[1:], *beside])}"
    value = node[stated[0]]
    if stated[0] == "$ref":
        is_local = isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return None if is_local else "'$ref' has to begin with '#/'"
    if stated[0] == "allOf" and isinstance(value, list) and len(value) > 1:
        return "'allOf' of several schemas cannot be enforced"
    if stated[0] == "oneOf" and isinstance(value, list) and not are_disjoint(value):
        return "'oneOf' cannot be enforced if a value may be valid against two of its schemas; use 'anyOf' instead"
    return None


def _problem_of_properties(node: Node) -> str | None:
    required, properties = node.get("required"), node.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                return f"'required' names {json.dumps(name)[:64]}, which is not among 'properties'"
    return None


def are_disjoint(schemas: list[Json]) -> bool:
    """Whether types and required constants show that no value is valid against two of `schemas`."""
    return all(_exclude_each_other(one, other) for index, one in enumerate(schemas) for other in schemas[index + 1 :])


def _exclude_each_other(one: Json, other: Json) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    types, other_types = _types(one), _types(other)
    if types and other_types and not types & other_types:
        return True
    constants, other_constants = _constants(one), _constants(other)
    return any(not constants[name] & other_constants[name] for name in constants.keys() & other_constants.keys())


def _types(schema: Node) -> frozenset[str]:
    """Return the types that a schema allows; empty if it names none. "integer" counts as "number"."""
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _constants(schema: Node) -> dict[str, frozenset[str]]:
    """Return the possible values, as JSON, of each required property, and of the value itself under the name ""."""
    found = {"": schema} | {
        f".{name}": inner
        for name, inner in (schema.get("properties") or {}).items()
        if name in (schema.get("required") or ()) and isinstance(inner, dict)
    }
    constants = {}
    for name, inner in found.items():
        if "const" in inner:
            constants[name] = frozenset({json.dumps(inner["const"], sort_keys=True)})
        elif isinstance(inner.get("enum"), list):
            constants[name] = frozenset(json.dumps(value, sort_keys=True) for value in inner["enum"])
    return constants
