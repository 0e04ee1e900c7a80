"""Calls of all kinds, and what notations can write of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from common.notations.notation import Call
from common.notations.pieces import CallArguments, CallStart, TextPiece
from common.types import ToolStyle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.notations.pieces import Parser, Piece

# Fragments of which texts consist, marks of all notations among them.
MARKS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<invoke name=", "</invoke>", "[TOOL_CALLS]", "[ARGS]",
    "<|tool_call|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<|tool_call>", "<tool_call|>", "<|channel|>", "<|message|>", "<|call|>", "<|python_tag|>", "```",
    "</think>", "<tool_calls>", "</tool_calls>", "</｜DSML｜parameter>", "</｜DSML｜invoke>", "｜DSML｜",
)  # fmt: skip
# What notations cannot write within a text: it is where the text ends.
ENDS = {
    ToolStyle.QWEN3_CODER: ("</parameter>",),
    ToolStyle.SEED: ("</parameter>",),
    ToolStyle.GLM: ("</arg_value>",),
    ToolStyle.GLM47: ("</arg_value>",),
    ToolStyle.MINIMAX: ("</parameter>",),
    ToolStyle.DEEPSEEK_V32: ("</｜DSML｜parameter>",),
    ToolStyle.GEMMA: ('<|"|>',),
    ToolStyle.HARMONY: ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
}
KEYS = ("word", "count", "ratio", "flag", "nothing", "list", "object", "naïve_key")
SCHEMA: dict[str, Any] = {  # Any: a JSON schema
    "type": "object",
    "properties": {
        "word": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "nothing": {"type": "null"},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "naïve_key": {"type": "string"},
    },
}
TOOLS = {"get_weather": SCHEMA, "add-2": SCHEMA}
FRAGMENTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.sampled_from([*MARKS, *"\n\\\"'{}[],:()<> \té🦜"]),
)
TEXTS = st.lists(FRAGMENTS, max_size=6).map("".join)
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.one_of(TEXTS, NUMBERS, st.booleans(), st.none())
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "word": TEXTS,
        "count": st.integers(-(10**12), 10**12),
        "ratio": st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: not value.is_integer()),
        "flag": st.booleans(),
        "nothing": st.none(),
        "list": st.lists(VALUES, max_size=3),
        "object": st.dictionaries(TEXTS, VALUES, max_size=3),
        "naïve_key": TEXTS,
    },
)


def calls_of(style: ToolStyle) -> st.SearchStrategy[list[Call]]:
    """Draw calls that a notation can write."""
    names = ["get_weather"] if style is ToolStyle.PYTHONIC else list(TOOLS)
    calls = st.builds(Call, st.sampled_from(names), ARGUMENTS)
    return st.lists(calls, min_size=1, max_size=3).filter(lambda drawn: can_write(style, drawn))


def can_write(style: ToolStyle, calls: Sequence[Call]) -> bool:
    """Whether no text contains the end of texts."""
    texts = [text for call in calls for text in texts_in(dict(call.arguments))]
    return not any(end in text for end in ENDS.get(style, ()) for text in texts)


def texts_in(value: object) -> list[str]:
    """Return all texts and keys of a value."""
    match value:
        case str():
            return [value]
        case dict():
            return [text for key, item in value.items() for text in (key, *texts_in(item))]
        case list():
            return [text for item in value for text in texts_in(item)]
        case _:
            return []


def fed(parser: Parser, parts: Iterable[str]) -> list[Piece]:
    """Return all pieces of a text in parts."""
    return [*(piece for part in parts for piece in parser.feed(part)), *parser.flush()]


def calls_in(pieces: Iterable[Piece]) -> list[Call]:
    """Return the calls that pieces add up to."""
    names: list[str] = []
    texts: list[str] = []
    for piece in pieces:
        match piece:
            case CallStart(call, name):
                assert call == len(names)
                names.append(name)
                texts.append("")
            case CallArguments(call, text):
                texts[call] += text
            case _:
                pass
    return [Call(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def text_in(pieces: Iterable[Piece]) -> str:
    """Return the text that pieces add up to."""
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
