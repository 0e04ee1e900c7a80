"""Fields of OpenAI's, SGLang's and vLLM's APIs that constrain an output's form, and their conversion to a grammar."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import orjson
from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from common.grammars import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from common.json_schemas import check_json_schema, check_size
from gateway.endpoints.schema import Schema, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

Json: TypeAlias = Any  # Any: free JSON

MAX_CHOICES = 1000
MAX_CHOICE_CHARACTERS = 4096
ANY_OBJECT = '{"type":"object"}'
# vLLM's names inside `structured_outputs`, and the equivalent top-level fields.
STRUCTURED = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
    "structural_tag": "structural_tag",
}
# Accepted inside `structured_outputs`, because white space is always fixed, and only the schema's properties are
# allowed.
HARMLESS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


class StructureFields(Schema):
    """The fields that constrain the output; at most one may be set."""

    response_format: dict[str, Json] | None = None
    structured_outputs: dict[str, Json] | None = None
    guided_json: str | bool | dict[str, Json] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, max_length=MAX_CHOICES)
    guided_grammar: str | None = None
    json_schema: str | bool | dict[str, Json] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Json] | None = None

    @model_validator(mode="after")
    def _has_one_structure(self) -> Self:
        _ = self.grammar
        return self

    @cached_property
    def grammar(self) -> Grammar | None:
        """The grammar of the output; None: free text.

        Raises:
            InvalidRequestError: a field is malformed or too large, or several are set.
        """
        found = [
            grammar
            for name, read in READERS.items()
            if (value := getattr(self, name)) and (grammar := read(value, name)) is not None
        ]
        if len(found) > 1:
            raise InvalidRequestError(
                f"'{found[0].param}' and '{found[1].param}' cannot both be given.", param=found[1].param
            )
        return found[0] if found else None


def refuse_with_grammar(grammar: Grammar | None, **others: object) -> None:
    """Refuse fields that may end a constrained output early, which clients could not distinguish from a complete one.

    Raises:
        InvalidRequestError: one of `others` is set.
    """
    for name, value in others.items():
        if grammar is not None and value:
            raise InvalidRequestError(f"'{name}' cannot be combined with '{grammar.param}'.", param=name)


def _response_format(value: dict[str, Json], param: str) -> Grammar | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT, param)
        case "json_schema":
            return _named_schema(value.get("json_schema"), f"{param}.json_schema")
        case "structural_tag":
            return _structural_tag(value, param)
        case _:
            raise InvalidRequestError(
                f"'{param}.type' should be text, json_object, json_schema or structural_tag.", param=f"{param}.type"
            )


def _named_schema(value: Json, param: str) -> Grammar:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{param}' should be an object with name and schema.", param=param)
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        if value.get(name) is not None and not isinstance(value[name], kind):
            raise InvalidRequestError(f"'{param}.{name}' has the wrong type.", param=f"{param}.{name}")
    if "schema" not in value:
        raise InvalidRequestError(f"Missing required parameter: '{param}.schema'.", param=f"{param}.schema")
    return _json_schema(value["schema"], f"{param}.schema")


def _json_schema(value: Json, param: str) -> Grammar:
    schema = _parsed(value, param)
    check_json_schema(schema, param)
    return checked_grammar(GrammarKind.JSON_SCHEMA, to_json(schema, param), param)


def _structural_tag(value: Json, param: str) -> Grammar:
    tag = _parsed(value, param)
    if not isinstance(tag, dict):
        raise InvalidRequestError(f"'{param}' should be an object.", param=param)
    check_size(tag, param)
    if "structures" in tag:
        tag = _from_structures(tag, param)
    if not isinstance(tag.get("format"), dict):
        raise InvalidRequestError(f"'{param}.format' should be an object.", param=f"{param}.format")
    _check_schemas_within(tag["format"], param)
    return checked_grammar(
        GrammarKind.STRUCTURAL_TAG, to_json({"type": "structural_tag", "format": tag["format"]}, param), param
    )


def _from_structures(tag: dict[str, Json], param: str) -> dict[str, Json]:
    """Convert the form of older clients (begin, schema and end of each structure) to the current one."""
    structures, triggers = tag["structures"], tag.get("triggers")
    is_well_formed = isinstance(structures, list) and all(
        isinstance(one, dict) and isinstance(one.get("begin"), str) and isinstance(one.get("end"), str)
        for one in structures
    )
    if not is_well_formed or not isinstance(triggers, list):
        raise InvalidRequestError(
            f"'{param}' should have structures with begin, schema and end, and triggers.", param=param
        )
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one["end"],
        }
        for one in structures
    ]
    return {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


def _check_schemas_within(value: Json, param: str) -> None:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_schemas_within(inner, param)
    if isinstance(value, dict) and "json_schema" in value:
        check_json_schema(value["json_schema"], param)


def _regex(value: str, param: str) -> Grammar:
    return checked_grammar(GrammarKind.REGEX, value, param)


def _ebnf(value: str, param: str) -> Grammar:
    return checked_grammar(GrammarKind.EBNF, value, param)


def _choices(value: list[str], param: str) -> Grammar:
    # Types inside `structured_outputs` are not validated before.
    items: list[object] = list(value)
    if not all(isinstance(item, str) and 0 < len(item) <= MAX_CHOICE_CHARACTERS for item in items):
        message = f"'{param}' should be a list of texts with 1 to {MAX_CHOICE_CHARACTERS} characters."
        raise InvalidRequestError(message, param=param)
    # The notation's strings are those of JSON, except that characters beyond the basic plane are not escaped.
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
    return checked_grammar(GrammarKind.EBNF, f"root ::= {choices}", param)


def _structured_outputs(value: dict[str, Json], param: str) -> Grammar | None:
    stated = {name: item for name, item in value.items() if item not in (None, False, "", [], {})}
    for name in stated:
        if name not in STRUCTURED and name != "json_object" and name not in HARMLESS:
            raise InvalidRequestError(f"'{param}.{name}' is not supported by this server.", param=f"{param}.{name}")
    found = [
        Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT, f"{param}.{name}")
        if name == "json_object"
        else _read_typed(STRUCTURED[name], item, f"{param}.{name}")
        for name, item in stated.items()
        if name not in HARMLESS
    ]
    if len(found) > 1:
        raise InvalidRequestError(f"'{param}' should have one of {', '.join(STRUCTURED)}.", param=param)
    return found[0] if found else None


def _read_typed(field: str, value: Json, param: str) -> Grammar | None:
    """Parse a value inside `structured_outputs` like the top-level field `field`, after checking its type."""
    expected = {"guided_regex": str, "guided_grammar": str, "guided_choice": list}.get(field)
    if expected is not None and not isinstance(value, expected):
        raise InvalidRequestError(f"'{param}' has the wrong type.", param=param)
    return READERS[field](value, param)


READERS: dict[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choices,
    "guided_grammar": _ebnf,
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}


def _parsed(value: Json, param: str) -> Json:
    if not isinstance(value, str):
        return value
    if len(value) > MAX_GRAMMAR_BYTES:
        raise _too_long(param)
    try:
        return orjson.loads(value)
    except ValueError as error:
        raise InvalidRequestError(f"'{param}' is no JSON: {error}.", param=param) from error


def checked_grammar(kind: GrammarKind, text: str, param: str) -> Grammar:
    """Return a grammar after checking its text.

    Raises:
        InvalidRequestError: it is too long, or has surrogates or NUL characters.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"'{param}' has surrogates, which are no characters.", param=param) from error
    if size > MAX_GRAMMAR_BYTES:
        raise _too_long(param)
    if "\x00" in text:
        raise InvalidRequestError(f"'{param}' has a NUL character.", param=param)
    return Grammar(kind, text, param)


def _too_long(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' is longer than {MAX_GRAMMAR_BYTES} bytes.", param=param)
