"""Answers with tool calls and reasoning, cut in every possible way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.notations.notation import Call
from common.notations.pieces import CallArguments, CallStart, Reasoning, TextPiece, merged
from common.notations.reasoning import MARKS as REASONING_MARKS
from common.notations.registry import NOTATIONS
from common.types import ReasoningStyle, ToolStyle
from gateway.parsing import ParsingRules, call_prefix
from tests.examples import examples

if TYPE_CHECKING:
    from common.notations.pieces import Piece

TOOLS: dict[str, dict[str, object]] = {"get_weather": {}, "add": {}}
A = '{"city": "Pa\\"r}is", "n": [1, {"x": "]"}]}'
THINK = ReasoningStyle.THINK
H, L, M, P = ToolStyle.HERMES, ToolStyle.LLAMA3, ToolStyle.MISTRAL, ToolStyle.PYTHONIC


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallStart(index, name), CallArguments(index, arguments)]


ONE = call(0, "get_weather", A)
TWO = [*ONE, *call(1, "add", '{"a": 1}')]

CASES: list[tuple[ParsingRules, str, list[Piece]]] = [
    (ParsingRules(H, TOOLS), "Hello there", [TextPiece("Hello there")]),
    (ParsingRules(H, TOOLS), f'<tool_call>\n{{"name": "get_weather", "arguments": {A}}}\n</tool_call>', ONE),
    (ParsingRules(H, TOOLS), f'<tool_call>{{"arguments": {A}, "name": "get_weather"}}</tool_call>', ONE),
    (ParsingRules(H, TOOLS), f'<tool_call>{{"id": 7, "name":"get_weather" , "arguments" : {A} }} </tool_call>\n', ONE),
    (
        ParsingRules(H, TOOLS),
        f'I look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {A}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        [TextPiece("I look."), *TWO],
    ),
    (
        ParsingRules(H, TOOLS, may_call_in_parallel=False),
        f'<tool_call>{{"name": "get_weather", "arguments": {A}}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        ONE,
    ),
    (ParsingRules(H, TOOLS), '<tool_call>{"name": "add"}</tool_call> Done', [*call(0, "add", "{}"), TextPiece("Done")]),
    (
        ParsingRules(H, TOOLS),
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "add", '{"a": 1}'),
    ),
    (
        ParsingRules(H, TOOLS),
        '<tool_call>{"name": "rm", "arguments": {}}',
        [TextPiece('<tool_call>{"name": "rm", "arguments": {}}')],
    ),
    (ParsingRules(H, TOOLS), "a <tool_cal l> b\n", [TextPiece("a <tool_cal l> b\n")]),
    (ParsingRules(H, TOOLS), "<tool_call>nonsense", [TextPiece("<tool_call>nonsense")]),
    (ParsingRules(H, TOOLS), '<tool_call>{"nam', [TextPiece('<tool_call>{"nam')]),
    (ParsingRules(H, TOOLS), '<tool_call>{"name": "add", "arguments": {"a"', call(0, "add", '{"a"')),
    (ParsingRules(L, TOOLS), f'{{"name": "get_weather", "parameters": {A}}}', ONE),
    (
        ParsingRules(L, TOOLS),
        f'<|python_tag|>{{"name": "get_weather", "parameters": {A}}}; {{"name": "add", "parameters": {{"a": 1}}}}',
        TWO,
    ),
    (ParsingRules(L, TOOLS), '{"answer": 42}', [TextPiece('{"answer": 42}')]),
    (ParsingRules(L, TOOLS), ' {"a": [1, 2]} is JSON', [TextPiece(' {"a": [1, 2]} is JSON')]),
    (ParsingRules(L, TOOLS), "Hello {}", [TextPiece("Hello {}")]),
    (
        ParsingRules(M, TOOLS),
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {A}}}, {{"name": "add", "arguments": {{"a": 1}}}}]',
        TWO,
    ),
    (ParsingRules(M, TOOLS), f"[TOOL_CALLS]get_weather[ARGS]{A}", ONE),
    (ParsingRules(M, TOOLS), f'Hm. [TOOL_CALLS]get_weather{A}[TOOL_CALLS]add{{"a": 1}}', [TextPiece("Hm."), *TWO]),
    (ParsingRules(M, TOOLS), "[TOOL_CALLS]rm{}", [TextPiece("[TOOL_CALLS]rm{}")]),
    (ParsingRules(M, TOOLS), "[TOOL_CALLSx", [TextPiece("[TOOL_CALLSx")]),
    (
        ParsingRules(P, TOOLS),
        "[get_weather(city='Pa)ris', n=[1, 2]), add(a=1)]",
        [*call(0, "get_weather", '{"city": "Pa)ris", "n": [1, 2]}'), *call(1, "add", '{"a": 1}')],
    ),
    (ParsingRules(P, TOOLS), "<|python_start|>[add(a=1)]<|python_end|>", call(0, "add", '{"a": 1}')),
    (ParsingRules(P, TOOLS), "[rm(a=1)]", [TextPiece("[rm(a=1)]")]),
    (ParsingRules(P, TOOLS), "[1, 2] are numbers", [TextPiece("[1, 2] are numbers")]),
    (ParsingRules(P, TOOLS), "[add(__import__('os'))]", [TextPiece("[add(__import__('os'))]")]),
    (ParsingRules(P, TOOLS), "[add(a=1", [TextPiece("[add(a=1")]),
    (
        ParsingRules(reasoning_style=THINK),
        "<think>\nI see.\n</think>\n\nYes.",
        [Reasoning("I see."), TextPiece("Yes.")],
    ),
    (ParsingRules(reasoning_style=THINK), "No <think>later</think>", [TextPiece("No <think>later</think>")]),
    (ParsingRules(reasoning_style=THINK), " plain", [TextPiece(" plain")]),
    (ParsingRules(reasoning_style=THINK), "<think>on and on ", [Reasoning("on and on")]),
    (ParsingRules(reasoning_style=THINK), "<think></think>x", [TextPiece("x")]),
    (
        ParsingRules(reasoning_style=THINK, begins_with_reasoning=True),
        "Hm </ </think> y",
        [Reasoning("Hm </"), TextPiece("y")],
    ),
    (
        ParsingRules(reasoning_style=THINK, begins_with_reasoning=True),
        "<think>Hm</think>y",
        [Reasoning("Hm"), TextPiece("y")],
    ),
    (
        ParsingRules(reasoning_style=ReasoningStyle.BRACKETS),
        "[THINK]I see.[/THINK]Yes [THINK]",
        [Reasoning("I see."), TextPiece("Yes [THINK]")],
    ),
    (
        ParsingRules(reasoning_style=ReasoningStyle.SEED),
        "<seed:think>a</seed:think>b",
        [Reasoning("a"), TextPiece("b")],
    ),
    (ParsingRules(reasoning_style=ReasoningStyle.KIMI), "◁think▷a◁/think▷b", [Reasoning("a"), TextPiece("b")]),
    (
        ParsingRules(reasoning_style=ReasoningStyle.GEMMA),
        "<|channel>thought\na\n<channel|>b",
        [Reasoning("a"), TextPiece("b")],
    ),
    (
        ParsingRules(reasoning_style=ReasoningStyle.RESPONSE),
        "<think>a</think>\n<response>b < c</response>",
        [Reasoning("a"), TextPiece("b < c")],
    ),
    (ParsingRules(reasoning_style=ReasoningStyle.RESPONSE), "<think>a</think>b", [Reasoning("a"), TextPiece("b")]),
    (
        ParsingRules(reasoning_style=ReasoningStyle.HARMONY),
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [Reasoning("Hm. "), TextPiece("Yes.")],
    ),
    (
        ParsingRules(reasoning_style=ReasoningStyle.HARMONY, joins_reasoning=True),
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        [TextPiece("Hm. Yes.")],
    ),
    (ParsingRules(reasoning_style=ReasoningStyle.HARMONY), "Yes <b", [TextPiece("Yes <b")]),
    (
        ParsingRules(ToolStyle.HARMONY, TOOLS, ReasoningStyle.HARMONY),
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
        '<|message|>{"a": 1}<|call|>',
        [Reasoning("Hm"), *call(0, "add", '{"a": 1}')],
    ),
    (
        ParsingRules(ToolStyle.HARMONY, TOOLS, ReasoningStyle.HARMONY),
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}',
        [TextPiece("I look."), *call(0, "add", '{"a": 1}')],
    ),
    (
        ParsingRules(H, TOOLS, reasoning_style=THINK, begins_with_reasoning=True),
        f'Let me <tool_call> see</think>\n<tool_call>{{"name": "get_weather", "arguments": {A}}}</tool_call>',
        [Reasoning("Let me <tool_call> see"), *ONE],
    ),
]


def read(reading: ParsingRules, parts: list[str]) -> list[Piece]:
    parser = reading.parser()
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    return merged([*pieces, *parser.flush()])


@pytest.mark.parametrize(("reading", "text", "expected"), CASES, ids=[text[:40] for _, text, _ in CASES])
def test_parsing_does_not_depend_on_the_chunk_boundaries(
    reading: ParsingRules, text: str, expected: list[Piece]
) -> None:
    assert read(reading, [text]) == expected
    assert read(reading, list(text)) == expected
    for cut in range(1, len(text)):
        assert read(reading, [text[:cut], text[cut:]]) == expected


# Reasoning and an answer that contain what marks begin with, and white space.
THOUGHT, ANSWER = "I see: 1 < 2, [1], </ and ◁.\n\n<|So", "1 <\n\n[2] </ is ◁ <|x"


# Harmony's prompts open no message.
MARKED = [style for style in ReasoningStyle if style is not ReasoningStyle.HARMONY]


@pytest.mark.parametrize(
    ("style", "begins"),
    [*((style, False) for style in ReasoningStyle), *((style, True) for style in MARKED)],
)
def test_reasoning_of_every_style_is_read_wherever_it_is_cut(style: ReasoningStyle, begins: bool) -> None:
    marks = REASONING_MARKS[style]
    is_harmony = style is ReasoningStyle.HARMONY
    between = "<|start|>assistant<|channel|>final<|message|>" if is_harmony else "\n\n"
    before, after = marks.answer
    opening = "" if begins else marks.opening
    text = f"{opening}{THOUGHT}{marks.closing}{between}{before}{ANSWER}{after}"
    rules = ParsingRules(reasoning_style=style, begins_with_reasoning=begins)
    expected = [Reasoning(THOUGHT), TextPiece(ANSWER)]
    assert read(rules, [text]) == expected
    assert read(rules, list(text)) == expected
    for cut in range(1, len(text)):
        assert read(rules, [text[:cut], text[cut:]]) == expected, text[:cut]
    for size in range(2, 6):
        assert read(rules, [text[at : at + size] for at in range(0, len(text), size)]) == expected, size


MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>", "<function=",
    "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    '<invoke name="', '">', "</invoke>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "call:",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "to=functions.",
    "<|tool_call_begin|>", "functions.add:0", "<|tool_call_argument_begin|>", "<|tool_call|>", "analysis", "final",
)  # fmt: skip
CALLS = ('{"name": "add", "arguments": {"a": 1}}', "add", "[add(a=1)", '"name"', '"add"')
FRAGMENTS = st.sampled_from([*'{}[]()",:; \n\\a<>=', *MARKS, *CALLS])


@examples(200)
@given(
    st.sampled_from([None, *ToolStyle]),
    st.booleans(),
    st.booleans(),
    st.lists(FRAGMENTS, max_size=25).map("".join),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_no_answer_is_read_differently_when_it_is_cut(
    style: ToolStyle | None, thinks: bool, begins: bool, text: str, sizes: list[int]
) -> None:
    reading = ParsingRules(style, TOOLS, THINK if thinks else None, thinks and begins)
    parts, position, index = [], 0, 0
    while position < len(text):
        parts.append(text[position : position + sizes[index % len(sizes)]])
        position += len(parts[-1])
        index += 1
    whole = read(reading, [text])
    assert read(reading, parts) == whole
    starts = [piece.call for piece in whole if isinstance(piece, CallStart)]
    assert starts == list(range(len(starts)))


@pytest.mark.parametrize("style", list(ToolStyle))
def test_an_answer_that_had_to_begin_with_a_call_is_read_with_its_beginning(style: ToolStyle) -> None:
    whole = NOTATIONS[style].render([Call("add", {"a": 1})])
    for name, begins in (("add", False), (None, True)):
        reading = ParsingRules(style, TOOLS, THINK if begins else None, begins_with_reasoning=begins)
        reading = replace(reading, prefix=call_prefix(reading, style, name))
        rest = whole.removeprefix(NOTATIONS[style].prefix(name))
        pieces = read(reading, list(rest))
        [start, arguments] = pieces
        assert isinstance(start, CallStart)
        assert isinstance(arguments, CallArguments)
        assert start.name == "add"
        assert json.loads(arguments.text) == {"a": 1}


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ParsingRules(H, TOOLS).parser()
    assert parser.feed('<tool_call>{"name": "add", "argu') == [CallStart(0, "add")]
    assert parser.feed('ments": {"a": ') == [CallArguments(0, '{"a": ')]
    assert parser.feed("1") == [CallArguments(0, "1")]
    assert json.loads('{"a": 1}') == {"a": 1}
