"""What forms of output mean for the pipeline, and which are refused before it hears of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.grammars import GrammarKind
from gateway.endpoints.completions.schema import CompletionBody
from gateway.endpoints.responses.schema import ResponseBody
from gateway.endpoints.schema import parse
from tests.gateway.support import HELLO

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, {"model": "tiny", "prompt": "x", **fields})


def refusal(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as refused:
        completion(**fields).sampling(None)
    return refused.value.param


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": "root ::= [a]"}, GrammarKind.EBNF, "root ::= [a]"),
        ({"guided_grammar": "root ::= [a]"}, GrammarKind.EBNF, "root ::= [a]"),
        ({"guided_choice": ["a", 'b"', "ü\n"]}, GrammarKind.EBNF, 'root ::= "a" | "b\\"" | "ü\\n"'),
        ({"structural_tag": TAG}, GrammarKind.STRUCTURAL_TAG, TAG),
        ({"response_format": TAG}, GrammarKind.STRUCTURAL_TAG, TAG),
    ],
)
def test_each_format_field_gives_one_grammar(fields: dict[str, Any], kind: GrammarKind, text: Any) -> None:
    grammar = completion(**fields).sampling(None).grammar
    assert grammar is not None
    assert grammar.kind is kind
    assert (grammar.text if isinstance(text, str) else json.loads(grammar.text)) == text
    assert grammar.param.startswith(next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": None},
        {"regex": ""},
        {"response_format": {"type": "text"}},
        {"guided_choice": []},
        {"structured_outputs": {}},
    ],
)
def test_empty_format_fields_create_no_grammar(fields: dict[str, Any]) -> None:
    assert completion(**fields).sampling(None).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "7"}, "json_schema"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structural_tag": {"format": 3}}, "structural_tag.format"),
        ({"regex": "a", "guided_choice": ["b"]}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"regex": "a\x00"}, "regex"),
        ({"regex": "a" * 140_000}, "regex"),
        ({"regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"guided_json": {"anyOf": [{"type": "integer"}] * 20_001}}, "guided_json"),
        ({"structural_tag": {"format": {"type": "json_schema", "json_schema": {"not": {}}}}}, "structural_tag"),
    ],
)  # fmt: skip
def test_invalid_format_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields) == param


def test_other_sampling_fields_are_kept_with_a_grammar() -> None:
    body = completion(regex="a+", min_tokens=3, ignore_eos=True, logit_bias={"5": 2}, bad_words=["b"])
    assert body.sampling(None).logit_bias == {5: 2}
    stop = body.stop_conditions(16)
    assert (stop.min_tokens, stop.ignore_eos) == (3, True)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {}},
        {"if": {}, "then": {}},
        {"dependentRequired": {"a": ["b"]}},
        {"allOf": [SCHEMA, SCHEMA]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"anyOf": [SCHEMA], "required": ["b"]},
        {"$ref": "https://example.com"},
        {"$ref": "#/$defs/a", "minimum": 5},
        {"type": "string", "pattern": "a", "maxLength": 3},
        {"type": "string", "format": "regex"},
        {"type": "object", "required": ["z"]},
        {"type": "integer", "multipleOf": 2, "minimum": 1},
        {"type": "object", "properties": {"a": {"items": {"prefixItems": [{"not": {}}]}}}},
    ],
)
def test_schema_keywords_that_the_grammar_would_ignore_are_refused(schema: dict[str, Any]) -> None:
    assert refusal(guided_json=schema) == "guided_json"


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"type": "integer"}, "format": {"enum": ["if"]}},
        "required": ["not"],
    }
    assert completion(guided_json=schema).grammar is not None


def test_the_format_of_a_response_is_named_as_its_client_does() -> None:
    body = parse(
        ResponseBody, {"model": "tiny", "input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}
    )
    with pytest.raises(InvalidRequestError) as refused:
        body.to_chat(HELLO)
    assert refused.value.param == "text.format"
    good = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    chat = parse(ResponseBody, {"model": "tiny", "input": "x", "text": good}).to_chat(HELLO)
    assert chat.grammar is not None
