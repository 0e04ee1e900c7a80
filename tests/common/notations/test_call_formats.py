"""Grammars of calls accept exactly the texts that the parsers read, with valid arguments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from common.grammars import Grammar, GrammarKind
from common.models import resolve_model
from common.notations.harmony import CALL
from common.notations.notation import BoundTool, Call
from common.notations.registry import NOTATIONS
from common.tokenization import load_text_model
from common.types import ToolStyle
from services.worker.engine.grammars.compiler import Compiler
from tests.common.notations.cases import ARGUMENTS, KEYS, SCHEMA, calls_in, can_write, fed, text_in, texts_in
from tests.examples import examples
from tests.services.worker.engine.grammars.outputs import SOURCE, bound_row, finished, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.notations.formats import Format

WEATHER = BoundTool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = BoundTool("clock", {"type": "object", "properties": {}, "additionalProperties": False})
SCHEMAS = {tool.name: tool.schema for tool in (WEATHER, CLOCK)}
STYLES = list(ToolStyle)
# Notations whose calls may follow text.
IN_TEXT = [
    ToolStyle.HERMES,
    ToolStyle.GLM,
    ToolStyle.DEEPSEEK_V31,
    ToolStyle.MINIMAX,
    ToolStyle.GEMMA,
    ToolStyle.MINIMAX_M1,
    ToolStyle.DEEPSEEK_V32,
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(SOURCE)


def compiled(compiler: Compiler, format_: Format) -> xgrammar.CompiledGrammar:
    text = json.dumps({"type": "structural_tag", "format": format_})
    return compiler.compile(Grammar(GrammarKind.STRUCTURAL_TAG, text, "tools"))


def matches(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether the grammar accepts a text as a whole output."""
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated()


def outputs(format_: Format, count: int = 1, begun: str = "") -> list[str]:
    """Sample a text under a format, beginning with `begun`."""
    text = json.dumps({"type": "structural_tag", "format": format_})
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, text, "tools")
    more = load_text_model(resolve_model(SOURCE.model)).tokenizer.encode(begun).ids if begun else ()
    rows = [bound_row(row, grammar, seed=row, length=400, more=more) for row in range(count)]
    return [text_of(ids) for ids in finished(rows)]


def read(style: ToolStyle, text: str) -> tuple[list[Call], str]:
    """Return the calls in an output, and the text beside them."""
    pieces = fed(NOTATIONS[style].parser(SCHEMAS), [text])
    return calls_in(pieces), text_in(pieces)


def rendered(style: ToolStyle, calls: Sequence[Call]) -> str:
    # The mark of harmony's last call ends the sequence.
    return NOTATIONS[style].render(calls).removesuffix(CALL)


@pytest.mark.parametrize("style", STYLES)
def test_the_call_of_a_named_tool_is_finished_as_its_schema_says(style: ToolStyle) -> None:
    notation = NOTATIONS[style]
    for output in outputs(notation.forced([WEATHER], named=True, in_parallel=False)):
        [call], words = read(style, notation.prefix(WEATHER.name) + output)
        assert (call.name, words.strip()) == (WEATHER.name, "")
        jsonschema.validate(call.arguments, WEATHER.schema)


@pytest.mark.parametrize(
    ("style", "in_parallel"), [*((style, True) for style in STYLES), (ToolStyle.HERMES, False), (ToolStyle.GLM, False)]
)
def test_forced_calls_name_a_given_tool(style: ToolStyle, in_parallel: bool) -> None:
    notation = NOTATIONS[style]
    for output in outputs(notation.forced([WEATHER, CLOCK], named=False, in_parallel=in_parallel)):
        calls, words = read(style, notation.prefix(None) + output)
        assert calls
        assert in_parallel or len(calls) == 1
        assert not words.strip()
        for call in calls:
            jsonschema.validate(call.arguments, SCHEMAS[call.name])


@pytest.mark.parametrize(
    "style", [ToolStyle.HERMES, ToolStyle.LLAMA3, ToolStyle.PYTHONIC, ToolStyle.QWEN3_CODER, ToolStyle.HARMONY]
)
def test_an_answer_is_either_tool_calls_or_content_in_the_requested_format(style: ToolStyle) -> None:
    notation = NOTATIONS[style]
    content: Format = {"type": "regex", "pattern": "(yes|no)"}
    for output in outputs(notation.free([WEATHER], in_parallel=False, content=content), count=4):
        calls, words = read(style, output)
        assert bool(calls) != (words in ("yes", "no"))
        for call in calls:
            jsonschema.validate(call.arguments, WEATHER.schema)


@pytest.mark.parametrize("style", IN_TEXT)
def test_a_call_inside_free_text_is_parsed_and_valid(style: ToolStyle) -> None:
    notation = NOTATIONS[style]
    begun = "Well: " + notation.prefix(None)
    format_ = notation.free([WEATHER], in_parallel=True, content=None)
    grammar = {"type": "sequence", "elements": [{"type": "const_string", "value": "Well: "}, format_]}
    # A random model does not write the first words of a call by itself.
    for output in outputs(grammar, begun=begun):
        calls, words = read(style, output)
        assert calls
        assert words.startswith("Well:")
        for call in calls:
            jsonschema.validate(call.arguments, SCHEMAS[call.name])


OBJECT = {**SCHEMA, "properties": {**SCHEMA["properties"], "object": {"type": "object", "additionalProperties": True}}}
BOUND = [BoundTool("get_weather", OBJECT), BoundTool("add-2", OBJECT)]


def drawn_calls(style: ToolStyle) -> st.SearchStrategy[list[Call]]:
    """Draw calls with arguments in the order of the schema, as grammars write them."""
    ordered = ARGUMENTS.map(lambda drawn: {key: drawn[key] for key in KEYS if key in drawn})
    if style is ToolStyle.GEMMA:
        # Values without a schema are constrained to some depth and to plain keys.
        ordered = ordered.map(lambda drawn: {key: drawn[key] for key in drawn if key not in ("list", "object")})
    calls = st.builds(Call, st.sampled_from([tool.name for tool in BOUND]), ordered)
    return st.lists(calls, min_size=1, max_size=2).filter(lambda drawn: is_regular(style, drawn))


def is_regular(style: ToolStyle, calls: Sequence[Call]) -> bool:
    """Whether grammars write such calls: texts of JSON without escapes of their own, numbers without exponents."""
    numbers = json.dumps([dict(call.arguments) for call in calls])
    texts = [text for call in calls for text in texts_in(dict(call.arguments))]
    is_plain = all(character.isprintable() or character in "\n\t" for text in texts for character in text)
    no_end = all("</parameter>" not in text and "</arg_value>" not in text for text in texts)
    return can_write(style, calls) and is_plain and no_end and "e+" not in numbers and "e-" not in numbers


GRAMMARS: dict[tuple[ToolStyle, bool], Any] = {}


@pytest.mark.parametrize("style", [style for style in STYLES if style is not ToolStyle.PYTHONIC])
@examples(6)
@given(data=st.data())
def test_grammars_accept_the_calls_that_the_notation_writes(
    compiler: Compiler, style: ToolStyle, data: st.DataObject
) -> None:
    notation = NOTATIONS[style]
    if (style, True) not in GRAMMARS:
        GRAMMARS[style, True] = compiled(compiler, notation.forced(BOUND, named=False, in_parallel=True))
        GRAMMARS[style, False] = compiled(compiler, notation.free(BOUND, in_parallel=True, content=None))
    text = rendered(style, data.draw(drawn_calls(style)))
    assert matches(GRAMMARS[style, True], text.removeprefix(notation.prefix(None)))
    assert matches(GRAMMARS[style, False], text)


@pytest.mark.parametrize("style", STYLES)
def test_grammars_refuse_what_the_schema_does(compiler: Compiler, style: ToolStyle) -> None:
    notation = NOTATIONS[style]
    named = compiled(compiler, notation.forced([WEATHER], named=True, in_parallel=False))
    prefix = notation.prefix(WEATHER.name)
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"city": "Paris", "days": 3}, True),
        ({"city": "London"}, False),
        ({"city": "Paris", "days": "x"}, False),
        ({"city": "Paris", "planet": "Mars"}, False),
        ({"days": 3}, False),
    ]
    for arguments, is_valid in cases:
        text = rendered(style, [Call(WEATHER.name, arguments)])
        assert matches(named, text.removeprefix(prefix)) == is_valid, arguments


@pytest.mark.parametrize(
    ("style", "schema", "is_bound"),
    [
        (ToolStyle.PYTHONIC, {"two words": {"type": "integer"}}, False),
        (ToolStyle.HERMES, {"two words": {"type": "integer"}}, True),
        (ToolStyle.QWEN3_CODER, {"two words": {"type": "integer"}}, True),
        (ToolStyle.QWEN3_CODER, {"a>b": {"type": "integer"}}, False),
        (ToolStyle.QWEN3_CODER, {"a": {"type": "string", "minLength": 2}}, False),
        (ToolStyle.GLM, {"a": {"type": ["string", "null"]}}, True),
        (ToolStyle.GLM, {"a": {"type": ["string", "object"]}}, False),
        (ToolStyle.GLM, {"a": {"enum": ["x", "</arg_value>"]}}, False),
        (ToolStyle.MINIMAX, {"a": {"type": "object", "properties": {"b": {"type": "string", "minLength": 2}}}}, True),
        (ToolStyle.GEMMA, {"a": {"type": "array", "items": {"type": "string"}}}, True),
        (ToolStyle.GEMMA, {"a": {"type": "string", "pattern": "x+"}}, False),
    ],
)
def test_strict_schemas_are_bound_where_the_notation_allows(
    style: ToolStyle, schema: dict[str, Any], is_bound: bool
) -> None:
    whole = {"type": "object", "properties": schema, "additionalProperties": False}
    assert NOTATIONS[style].can_bind(whole) is is_bound
