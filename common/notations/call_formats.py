"""Tool calls as formats of structural tags: the grammar allows exactly the notations that this package parses.

Formats are XGrammar's (`xgrammar.structural_tag`), as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from common.types import ToolStyle

CLOSING, OPENING = "</think>", "<think>"

if TYPE_CHECKING:
    from collections.abc import Sequence

Format: TypeAlias = dict[str, Any]  # Any: JSON

MISTRAL_TOKEN = "[TOOL_CALLS]"
ANY_TEXT: Format = {"type": "any_text"}


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool with the JSON schema of its arguments, which describes an object."""

    name: str
    schema: dict[str, Any]  # Any: a JSON schema


def forced_calls(style: ToolStyle, tools: Sequence[BoundTool], *, named: bool, in_parallel: bool) -> Format:
    """Return the format of an output after `answers.call_prefix`, which with `named` includes the tool's name."""
    notation = _NOTATIONS[style]
    first = notation.rest_of(tools[0]) if named else _either([notation.named(tool) for tool in tools])
    more = [] if named or not in_parallel else [_more(notation, tools)]
    return _sequence(first, *more, *_const(notation.end))


def free_calls(
    style: ToolStyle, tools: Sequence[BoundTool], *, in_parallel: bool, content: Format | None = None
) -> Format:
    """Return the format of an output that is either calls or text; the text must match `content`, if given."""
    notation = _NOTATIONS[style]
    if style is ToolStyle.HERMES and content is None:
        tags = [
            {
                "type": "tag",
                "begin": f"{notation.start}{notation.name_of(tool)}",
                "content": notation.arguments(tool),
                "end": notation.close,
            }
            for tool in tools
        ]
        trigger = notation.start.partition("\n")[0]
        return {
            "type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not in_parallel,
        }  # fmt: skip
    opening = [{"type": "token", "token": MISTRAL_TOKEN}] if style is ToolStyle.MISTRAL else []
    first = _either([notation.named(tool) for tool in tools])
    more = [_more(notation, tools)] if in_parallel else []
    start = notation.start.removeprefix(MISTRAL_TOKEN)
    calls = _sequence(*opening, *_const(start), first, *more, *_const(notation.end))
    return _either([calls, content or _text_around_calls(style)])


def after_reasoning(format_: Format, *, is_open: bool) -> Format:
    """Return a format with optional reasoning before `format_`; with `is_open`, the prompt has opened the block."""
    block = {"type": "tag", "begin": "" if is_open else OPENING, "content": ANY_TEXT, "end": CLOSING}
    thought = _sequence(block, {"type": "regex", "pattern": r"\n{0,2}"})
    return _sequence(thought if is_open else {"type": "optional", "content": thought}, format_)


@dataclass(frozen=True, slots=True)
class _Notation:
    """The notation of calls: `start` precedes the first name, `close` ends a call, `again` separates two."""

    start: str
    key: str
    close: str
    again: str
    end: str = ""

    def name_of(self, tool: BoundTool) -> str:
        """Return the text after `start`, up to the arguments."""
        return f'{json.dumps(tool.name, ensure_ascii=False)[1:-1]}", "{self.key}": '

    def arguments(self, tool: BoundTool) -> Format:
        """Return the format of the arguments."""
        return {"type": "json_schema", "json_schema": tool.schema, "max_whitespace_cnt": 1}

    def rest_of(self, tool: BoundTool) -> Format:
        """Return the format of a call after its name."""
        return _sequence(self.arguments(tool), *_const(self.close))

    def named(self, tool: BoundTool) -> Format:
        """Return the format of a call from its name on."""
        return _sequence(*_const(self.name_of(tool)), self.rest_of(tool))


class _PythonNotation(_Notation):
    """Arguments are Python keyword arguments with JSON values, which the parser accepts, too."""

    __slots__ = ()

    def name_of(self, tool: BoundTool) -> str:
        return f"{tool.name}("

    def arguments(self, tool: BoundTool) -> Format:
        properties = tool.schema.get("properties") or {}
        required = [name for name in properties if name in (tool.schema.get("required") or ())]
        optional = [name for name in properties if name not in required]
        shared = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
        values: dict[str, Format] = {
            name: _sequence(
                *_const(f"{name}="),
                {"type": "json_schema", "json_schema": shared | schema if shared else schema, "max_whitespace_cnt": 1},
            )
            for name, schema in properties.items()
        }

        def behind(names: list[str]) -> list[Format]:
            return [{"type": "optional", "content": _sequence(*_const(", "), values[name])} for name in names]

        if required:
            first, *others = (values[name] for name in required)
            joined = [part for value in others for part in (*_const(", "), value)]
            return _sequence(first, *joined, *behind(optional))
        if not optional:
            # No arguments; a format must not be empty, hence an optional space.
            return {"type": "optional", "content": {"type": "const_string", "value": " "}}
        starts = [_sequence(values[name], *behind(optional[index + 1 :])) for index, name in enumerate(optional)]
        return {"type": "optional", "content": _either(starts)}


_NOTATIONS: dict[ToolStyle, _Notation] = {
    ToolStyle.HERMES: _Notation('<tool_call>\n{"name": "', "arguments", "}\n</tool_call>", '\n<tool_call>\n{"name": "'),
    ToolStyle.LLAMA3: _Notation('{"name": "', "parameters", "}", '; {"name": "'),
    ToolStyle.MISTRAL: _Notation(f'{MISTRAL_TOKEN} [{{"name": "', "arguments", "}", ', {"name": "', "]"),
    ToolStyle.PYTHONIC: _PythonNotation("[", "", ")", ", ", "]"),
}


def can_bind(style: ToolStyle, schema: dict[str, Any]) -> bool:  # Any: a JSON schema
    """Whether the notation can express arguments of this schema: Python's keywords must be identifiers."""
    if style is not ToolStyle.PYTHONIC:
        return True
    properties = schema.get("properties") or {}
    return (
        all(name.isidentifier() and isinstance(inner, dict) for name, inner in properties.items())
        and not any(name in schema for name in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties"))
        and not schema.get("additionalProperties")
    )


def _more(notation: _Notation, tools: Sequence[BoundTool]) -> Format:
    again = _sequence(*_const(notation.again), _either([notation.named(tool) for tool in tools]))
    return {"type": "star", "content": again}


def _text_around_calls(style: ToolStyle) -> Format:
    """Return the format of texts that the style's parser does not parse as calls."""
    match style:
        case ToolStyle.HERMES | ToolStyle.MISTRAL:
            # Calls are marked by a special token, which does not match as text.
            return ANY_TEXT
        case ToolStyle.LLAMA3:
            return _starting_with(r"[^\s{]")
        case ToolStyle.PYTHONIC:
            return _starting_with(r"[^\s\[<]")
        case _ as never:
            assert_never(never)


def _starting_with(pattern: str) -> Format:
    return {"type": "optional", "content": _sequence({"type": "regex", "pattern": pattern}, ANY_TEXT)}


def _const(text: str) -> list[Format]:
    return [{"type": "const_string", "value": text}] if text else []


def _sequence(*parts: Format) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def _either(parts: list[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}
