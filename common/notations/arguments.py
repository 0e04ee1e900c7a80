"""Arguments of calls as notations write them: as text, and as the format of all texts that match a schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from common.notations.formats import (
    const,
    either,
    json_value,
    marked,
    optional,
    regex,
    separated,
    sequence,
    star,
    text_without,
)  # fmt: skip
from common.notations.schemas import constrains_text, types_of, with_definitions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common.notations.formats import Format, Schema

Json: TypeAlias = Any  # Any: free JSON
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")
# Values without a schema are constrained to this depth, where a grammar cannot be recursive.
MAX_FREE_DEPTH = 3


class Arguments(Protocol):
    """The notation of arguments."""

    def render(self, arguments: Mapping[str, Json]) -> str:
        """Return the text of `arguments`."""

    def format(self, schema: Schema) -> Format:
        """Return the format of the arguments that match `schema`, an object's."""

    def can_bind(self, schema: Schema) -> bool:
        """Whether the format enforces all of `schema`."""


def to_json(value: Json) -> str:
    """Return JSON without escapes of letters, as models write it."""
    return json.dumps(value, ensure_ascii=False)


class JsonArguments:
    """One JSON object."""

    def render(self, arguments: Mapping[str, Json]) -> str:
        return to_json(arguments)

    def format(self, schema: Schema) -> Format:
        return json_value(schema)

    def can_bind(self, _schema: Schema) -> bool:
        return True


class PythonArguments:
    """Keyword arguments with JSON values, which the parser of Python calls accepts, too."""

    def render(self, arguments: Mapping[str, Json]) -> str:
        return ", ".join(f"{name}={to_json(value)}" for name, value in arguments.items())

    def format(self, schema: Schema) -> Format:
        required: list[Format] = []
        others: list[Format] = []
        for name, inner in (schema.get("properties") or {}).items():
            value = sequence(*const(f"{name}="), json_value(with_definitions(inner, schema)))
            (required if name in (schema.get("required") or ()) else others).append(value)
        # A format must not be empty, hence an optional space.
        return separated(required, others, ", ") or optional(*const(" "))

    def can_bind(self, schema: Schema) -> bool:
        return _names_its_properties(schema) and all(name.isidentifier() for name in schema.get("properties") or {})


@dataclass(frozen=True, slots=True)
class KeyedArguments:
    """One element per argument. Texts are written without quotes, other values as JSON."""

    before_key: str
    # Between key and value.
    after_key: str
    after_value: str
    # The end of a value, which must not occur in it.
    end: str
    # Characters that keys must not contain.
    forbidden: str
    # What stands between key and value where values are no texts, if that is not `after_key`.
    after_key_of_others: str = ""

    def render(self, arguments: Mapping[str, Json]) -> str:
        return "".join(
            f"{self.before_key}{name}{self._between(is_text=isinstance(value, str))}"
            f"{value if isinstance(value, str) else to_json(value)}{self.after_value}"
            for name, value in arguments.items()
        )

    def format(self, schema: Schema) -> Format:
        properties = schema.get("properties") or {}
        if not properties and schema.get("additionalProperties") is not False:
            key = regex(r"[A-Za-z0-9_.\-]+")
            return star(sequence(*marked(self.before_key), key, self._typed({}), *marked(self.after_value)))
        parts = []
        for name, inner in properties.items():
            value = self._typed(with_definitions(inner, schema))
            element = sequence(*marked(f"{self.before_key}{name}"), value, *marked(self.after_value))
            parts.append(element if name in (schema.get("required") or ()) else optional(element))
        return sequence(*parts) if parts else optional(*const("\n"))

    def can_bind(self, schema: Schema) -> bool:
        return _names_its_properties(schema) and all(
            not set(name) & set(self.forbidden) and bool(name) and self._can_bind_value(with_definitions(inner, schema))
            for name, inner in (schema.get("properties") or {}).items()
        )

    def _between(self, *, is_text: bool) -> str:
        return self.after_key if is_text else self.after_key_of_others or self.after_key

    def _typed(self, schema: Schema) -> Format:
        """Return the format of what stands between a key and the end of its value."""
        types = types_of(schema)
        if "string" not in types:
            return sequence(*marked(self._between(is_text=False)), json_value(schema))
        text = sequence(*marked(self.after_key), self._text(schema))
        if not self.after_key_of_others:
            return text
        others = [
            sequence(*marked(self.after_key_of_others), json_value({"type": kind}))
            for kind in sorted(types - {"string"})
        ]
        return either([text, *others])

    def _text(self, schema: Schema) -> Format:
        texts = _stated_texts(schema)
        if texts is not None and self.end not in "".join(texts):
            return either([part for text in texts for part in const(text)])
        return text_without(self.end)

    def _can_bind_value(self, schema: Schema) -> bool:
        types = types_of(schema)
        if "string" not in types:
            return True
        texts = _stated_texts(schema)
        if texts is not None:
            return bool(texts) and all(text and self.end not in text for text in texts)
        return not constrains_text(schema) and not types & {"array", "object"}


@dataclass(frozen=True, slots=True)
class GemmaArguments:
    """An object whose keys are not quoted, with a mark on both sides of texts."""

    quote: str

    def render(self, arguments: Mapping[str, Json]) -> str:
        return self._text_of(dict(arguments))

    def format(self, schema: Schema) -> Format:
        return self._object(schema, schema, MAX_FREE_DEPTH)

    def can_bind(self, schema: Schema) -> bool:
        return all(map(_can_bind_to_gemma, _inner_schemas(schema)))

    def _text_of(self, value: Json) -> str:
        match value:
            case str():
                return f"{self.quote}{value}{self.quote}"
            case dict():
                return "{" + ",".join(f"{self._key(key)}:{self._text_of(item)}" for key, item in value.items()) + "}"
            case list():
                return "[" + ",".join(map(self._text_of, value)) + "]"
            case _:
                return to_json(value)

    def _key(self, key: str) -> str:
        return key if _is_plain_key(key) else f"{self.quote}{key}{self.quote}"

    def _object(self, schema: Schema, whole: Schema, depth: int) -> Format:
        properties = schema.get("properties") or {}
        if not properties and schema.get("additionalProperties") is not False:
            member = sequence(regex(r"[A-Za-z_][A-Za-z0-9_]*"), *const(":"), self._any(depth - 1))
            more = star(sequence(*const(","), member))
            return sequence(*const("{"), optional(sequence(member, more)), *const("}"))
        required: list[Format] = []
        others: list[Format] = []
        for name, inner in properties.items():
            part = sequence(*marked(f"{self._key(name)}:"), self._value(inner, whole, depth))
            (required if name in (schema.get("required") or ()) else others).append(part)
        members = separated(required, others, ",")
        return sequence(*const("{"), *([members] if members else []), *const("}"))

    def _value(self, schema: Schema, whole: Schema, depth: int) -> Format:
        texts = _stated_texts(schema)
        if texts is not None:
            return either([sequence(*marked(f"{self.quote}{text}{self.quote}")) for text in texts])
        if "enum" in schema or "const" in schema:
            return json_value(schema)
        types = types_of(with_definitions(schema, whole))
        parts = [self._of_type(kind, schema, whole, depth) for kind in sorted(types) if kind != "integer"]
        if "integer" in types and "number" not in types:
            parts.append(json_value({**_numeric(schema), "type": "integer"}))
        return either(parts)

    def _of_type(self, kind: str, schema: Schema, whole: Schema, depth: int) -> Format:
        match kind:
            case "string":
                return self._text()
            case "array" if depth > 0:
                items = schema.get("items")
                item = self._value(items, whole, depth) if isinstance(items, dict) else self._any(depth - 1)
                return sequence(*const("["), optional(sequence(item, star(sequence(*const(","), item)))), *const("]"))
            case "array":
                return sequence(*const("[]"))
            case "object" if depth > 0:
                return self._object(schema, whole, depth)
            case "object":
                return sequence(*const("{}"))
            case "number":
                return json_value({**_numeric(schema), "type": "number"})
            case _:
                return json_value({"type": kind})

    def _text(self) -> Format:
        return sequence(*marked(self.quote), text_without(self.quote), *marked(self.quote))

    def _any(self, depth: int) -> Format:
        return self._value({}, {}, depth)


def _names_its_properties(schema: Schema) -> bool:
    properties = schema.get("properties") or {}
    return (
        all(isinstance(inner, dict) for inner in properties.values())
        and not any(name in schema for name in _ALTERNATIVES)
        and not schema.get("additionalProperties")
    )


def _stated_texts(schema: Schema) -> list[str] | None:
    """Return the texts that a schema lists; None if it lists none, or other values."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    is_list_of_texts = isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
    return values if is_list_of_texts else None


def _is_plain_key(key: str) -> bool:
    return key.isidentifier() and key.isascii()


def _numeric(schema: Schema) -> Schema:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    return {name: schema[name] for name in names if name in schema}


def _inner_schemas(schema: Schema) -> Iterator[Schema]:
    yield schema
    for inner in (schema.get("properties") or {}).values():
        yield from _inner_schemas(inner) if isinstance(inner, dict) else ()
    if isinstance(schema.get("items"), dict):
        yield from _inner_schemas(schema["items"])


def _can_bind_to_gemma(schema: Schema) -> bool:
    texts = _stated_texts(schema)
    if texts is None and (("enum" in schema) or ("const" in schema)):
        values = schema.get("enum", [schema.get("const")])
        return not any(isinstance(value, str | list | dict) for value in values)
    is_free = texts is not None or not constrains_text(schema)
    states_items = isinstance(schema.get("items"), dict) or "array" not in types_of(schema)
    limits_items = any(name in schema for name in ("minItems", "maxItems", "prefixItems", "minProperties"))
    return _names_its_properties(schema) and is_free and states_items and not limits_items and "type" in schema
