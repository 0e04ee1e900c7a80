"""The grammar of a chat's output: its response format, the schemas of tools, and the reasoning before both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from common.errors import InvalidRequestError
from common.grammars import Grammar, GrammarKind
from common.json_schemas import check_json_schema
from common.notations.formats import ANY_TEXT, ANY_TOKENS
from common.notations.notation import BoundTool
from common.notations.reasoning import answered, reasoned
from common.notations.registry import NOTATIONS
from gateway.endpoints.schema import to_json
from gateway.endpoints.structure_fields import checked_grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.notations.formats import Format
    from common.types import ToolStyle
    from gateway.endpoints.chat.schema import ChatCompletionBody
    from gateway.parsing import ParsingRules

# For tools without a schema, and for non-strict tools whose schema cannot be enforced.
ANY_OBJECT = {"type": "object"}
# The field that limits reasoning.
BUDGET = "thinking_token_budget"


def chat_grammar(body: ChatCompletionBody, reading: ParsingRules) -> Grammar | None:
    """Return the grammar of the output, after the part that the prompt contains.

    The arguments of calls follow their tool's schema if calls are required or any tool is strict.

    Raises:
        InvalidRequestError: a strict tool's schema cannot be enforced.
    """
    own = body.grammar
    style, tools = reading.tool_style, body.callable_tools
    if style is None or not tools:
        return _text_grammar(own, reading)
    choice = body.tool_choice
    is_forced = choice is not None and choice.mode == "required"
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if not is_forced and own is None and not is_strict:
        if reading.budget is None:
            return None
        if not reading.is_in_messages:
            return _tag(_thinking(ANY_TOKENS, reading), BUDGET)
    name = choice.name if choice is not None else None
    bound = [
        _bind(tool, number, style) for number, tool in enumerate(tools) if name in (None, tool["function"]["name"])
    ]
    notation, in_parallel = NOTATIONS[style], reading.may_call_in_parallel
    if is_forced:
        return _tag(notation.forced(bound, named=name is not None, in_parallel=in_parallel), "tools")
    content = _format_of(own) if own is not None else None
    answer = notation.free(bound, in_parallel=in_parallel, content=content)
    param = own.param if own is not None else "tools" if is_strict else BUDGET
    return _tag(_thinking(answer, reading), param)


def _text_grammar(own: Grammar | None, reading: ParsingRules) -> Grammar | None:
    """Return the grammar of an output without calls."""
    style = reading.reasoning_style
    if style is None or (own is None and reading.budget is None):
        return own
    if own is not None:
        return _tag(_thinking(answered(style, _format_of(own)), reading), own.param)
    answer = answered(style, ANY_TEXT) if reading.is_in_messages else ANY_TOKENS
    return _tag(_thinking(answer, reading), BUDGET)


def _bind(tool: Mapping[str, Any], number: int, style: ToolStyle) -> BoundTool:  # Any: a JSON schema
    function = tool["function"]
    param = f"tools[{number}].function.parameters"
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    try:
        check_json_schema(schema, param)
        if not isinstance(schema, dict) or not NOTATIONS[style].can_bind(schema):
            raise InvalidRequestError(f"'{param}' cannot be written as this model's calls.", param=param)
    except InvalidRequestError:
        if function.get("strict"):
            raise
        schema = ANY_OBJECT
    return BoundTool(function["name"], {"type": "object", **schema} if "$ref" not in schema else schema)


def _format_of(grammar: Grammar) -> Format:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": json.loads(grammar.text), "max_whitespace_cnt": 1}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            format_: Format = json.loads(grammar.text)["format"]
            return format_


def _thinking(format_: Format, reading: ParsingRules) -> Format:
    if reading.reasoning_style is None or (reading.joins_reasoning and reading.budget is None):
        return format_
    return reasoned(reading.reasoning_style, format_, is_open=reading.begins_with_reasoning, budget=reading.budget)


def _tag(format_: Format, param: str) -> Grammar:
    text = to_json({"type": "structural_tag", "format": format_}, param)
    return checked_grammar(GrammarKind.STRUCTURAL_TAG, text, param)
