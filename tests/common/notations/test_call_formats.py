"""What a grammar of calls lets through is what the parsers read, with arguments that are valid."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from common.grammars import Grammar, GrammarKind
from common.models import resolve
from common.notations.call_formats import BoundTool, after_reasoning, can_bind, forced_calls, free_calls
from common.notations.pieces import CallArguments, CallStart, Text
from common.tokenization import load_text_model
from common.types import ToolStyle
from gateway.parsing.answers import Reading, call_prefix
from tests.services.worker.engine.grammars.outputs import SOURCE, bound_row, finished, text_of

if TYPE_CHECKING:
    from common.notations.call_formats import Format

WEATHER = BoundTool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = BoundTool("clock", {"type": "object", "properties": {}, "additionalProperties": False})
SCHEMAS = {tool.name: tool.schema for tool in (WEATHER, CLOCK)}
STYLES = list(ToolStyle)


def outputs(format_: Format, count: int = 4, begun: str = "") -> list[str]:
    """Return what is sampled under a format, beginning with the text `begun`."""
    text = json.dumps({"type": "structural_tag", "format": format_})
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, text, "tools")
    more = load_text_model(resolve(SOURCE.model)).tokenizer.encode(begun).ids if begun else ()
    rows = [bound_row(row, grammar, seed=row, length=400, more=more) for row in range(count)]
    return [text_of(ids) for ids in finished(rows)]


def read(style: ToolStyle, prefix: str, text: str) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls in an answer, and the text beside them."""
    parser = Reading(tool_style=style, tools=frozenset(SCHEMAS), prefix=prefix).parser()
    pieces = [*parser.feed(text), *parser.flush()]
    names = {piece.call: piece.name for piece in pieces if isinstance(piece, CallStart)}
    arguments = dict.fromkeys(names, "")
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.call] += piece.text
    words = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return [(name, json.loads(arguments[call])) for call, name in names.items()], words


@pytest.mark.parametrize("style", STYLES)
def test_the_call_of_a_named_tool_is_finished_as_its_schema_says(style: ToolStyle) -> None:
    prefix = call_prefix(style, WEATHER.name, begins_with_reasoning=False)
    for output in outputs(forced_calls(style, [WEATHER], named=True, in_parallel=False)):
        [(name, arguments)], words = read(style, prefix, output)
        assert (name, words.strip()) == (WEATHER.name, "")
        jsonschema.validate(arguments, WEATHER.schema)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("in_parallel", [False, True])
def test_forced_calls_name_a_given_tool(style: ToolStyle, in_parallel: bool) -> None:
    prefix = call_prefix(style, None, begins_with_reasoning=False)
    for output in outputs(forced_calls(style, [WEATHER, CLOCK], named=False, in_parallel=in_parallel)):
        calls, words = read(style, prefix, output)
        assert calls
        assert in_parallel or len(calls) == 1
        assert not words.strip()
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])


@pytest.mark.parametrize("style", [ToolStyle.LLAMA3, ToolStyle.PYTHONIC, ToolStyle.HERMES])
def test_an_answer_is_either_tool_calls_or_content_in_the_requested_format(style: ToolStyle) -> None:
    content: Format = {"type": "regex", "pattern": "(yes|no)"}
    kinds = set()
    for output in outputs(free_calls(style, [WEATHER], in_parallel=False, content=content), count=8):
        calls, words = read(style, "", output)
        assert bool(calls) != (words in ("yes", "no"))
        kinds.add(bool(calls))
        for _, arguments in calls:
            jsonschema.validate(arguments, WEATHER.schema)
    assert kinds == {True, False}


def test_a_call_inside_free_text_is_parsed_and_valid() -> None:
    format_ = free_calls(ToolStyle.HERMES, [WEATHER], in_parallel=True)
    grammar = {"type": "sequence", "elements": [{"type": "const_string", "value": "Well: "}, format_]}
    found = 0
    # A random model does not write the first words of a call by itself.
    for output in outputs(grammar, begun="Well: <tool_call>"):
        calls, _ = read(ToolStyle.HERMES, "", output)
        found += len(calls)
        assert output.count("<tool_call>") >= len(calls)
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
    assert found


@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_precedes_the_constrained_text(is_open: bool) -> None:
    format_ = after_reasoning({"type": "regex", "pattern": "[0-9]{2}"}, is_open=is_open)
    ends = [output for output in outputs(format_, count=8) if re.search(r"[0-9]{2}$", output)]
    assert ends or is_open  # what goes on thinking is cut off
    for output in ends:
        parser = Reading(has_reasoning=True, begins_with_reasoning=is_open).parser()
        pieces = [*parser.feed(output), *parser.flush()]
        words = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        assert words.strip() == output[-2:]


def test_keywords_of_python_have_to_be_identifiers() -> None:
    odd = {"type": "object", "properties": {"two words": {"type": "integer"}}}
    assert not can_bind(ToolStyle.PYTHONIC, odd)
    assert can_bind(ToolStyle.HERMES, odd)
