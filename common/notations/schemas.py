"""The types that a JSON schema allows, for notations that write texts without quotes."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Json: TypeAlias = Any  # Any: free JSON
# The JSON schema of each tool's arguments, by name.
Tools: TypeAlias = "Mapping[str, Mapping[str, Json]]"

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_REFERENCES = 16
# Longer literals are texts.
MAX_LITERAL_CHARACTERS = 64 * 1024
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_LIMITS_OF_TEXT = ("pattern", "format", "minLength", "maxLength", "enum", "const")


def property_of(schema: Mapping[str, Json], name: str) -> Json:
    """Return the schema of a property, with the definitions it may refer to; an empty one if there is none."""
    whole = _resolved(schema, schema)
    properties = whole.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(found, dict):
        found = whole.get("additionalProperties")
    return with_definitions(found, schema) if isinstance(found, dict) else {}


def with_definitions(schema: Json, whole: Mapping[str, Json]) -> Json:
    """Return `schema`, a part of `whole`, with the definitions of the latter."""
    shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    return shared | schema if shared and isinstance(schema, dict) else schema


def types_of(schema: Json) -> frozenset[str]:
    """Return the types that the schema allows: all of them, if it does not say."""
    found: set[str] = set()
    for part in _alternatives(schema, schema, MAX_REFERENCES):
        stated = part.get("type")
        if isinstance(stated, str):
            found.add(stated)
        elif isinstance(stated, list):
            found.update(str(name) for name in stated)
        elif isinstance(values := part.get("enum", [part["const"]] if "const" in part else None), list):
            found.update(map(_type_of, values))
        elif "properties" in part:
            found.add("object")
        else:
            return ALL_TYPES
    return frozenset(found) & ALL_TYPES or ALL_TYPES


def constrains_text(schema: Json) -> bool:
    """Whether the schema constrains the texts that it allows."""
    return any(name in part for part in _alternatives(schema, schema, MAX_REFERENCES) for name in _LIMITS_OF_TEXT)


def typed(text: str, types: frozenset[str]) -> Json:
    """Return the value that an unquoted `text` stands for, where `types` are allowed.

    Texts that no other allowed type matches are strings.
    """
    if types == {"string"}:
        return text
    found, value = _literal(text.strip())
    if not found:
        return text
    kind = _type_of(value)
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if kind == "number" and "integer" in types and "string" not in types and value.is_integer():
        return int(value)
    return text if "string" in types else value


def _literal(text: str) -> tuple[bool, Json]:
    if text in _CONSTANTS:
        return True, _CONSTANTS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    # A quoted text is taken as it is.
    if value is not None:
        return not isinstance(value, str), value
    if text[:1] not in ("{", "[") or len(text) > MAX_LITERAL_CHARACTERS:
        return False, None
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False, None
    return isinstance(value, dict | list), value


def _type_of(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _alternatives(schema: Json, whole: Mapping[str, Json], left: int) -> Iterator[Mapping[str, Json]]:
    if not isinstance(schema, dict) or not left:
        yield {}
        return
    schema = _resolved(schema, whole)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            for part in schema[name]:
                yield from _alternatives(part, whole, left - 1)
            return
    yield schema


def _resolved(schema: Mapping[str, Json], whole: Mapping[str, Json]) -> Mapping[str, Json]:
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: Json = whole
        for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            return {}
        schema = target
    return {}
