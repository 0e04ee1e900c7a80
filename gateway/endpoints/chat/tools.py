"""Tools, the choice between them, and the rules for parsing outputs with calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, InstanceOf, WithJsonSchema
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from gateway.parsing import ParsingRules, call_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.pipeline.port import ModelInfo

MAX_TOOLS = 256
MAX_TOOL_NAME_CHARACTERS = 256
CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}


# Maximum tokens of reasoning by effort, for models whose template does not read the effort.
EFFORT_BUDGETS = {"minimal": 512, "low": 1024, "medium": 4096, "high": 16_384}


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that a request asks for."""

    # None: the model's default.
    is_on: bool | None = None
    effort: str | None = None
    # Maximum number of tokens.
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a tool must be called, and which one."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _choice(value: object) -> object:
    match value:
        case None | ToolChoice():
            return value
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice("required", name)
        case _:
            example = '{"type": "function", "function": {"name": "…"}}'
            message = 'should be "none", "auto", "required" or {example}'
            raise PydanticCustomError("tool_choice", message, {"example": example})


def _tools(value: object) -> object:
    for tool in value if isinstance(value, list) else []:
        kind = tool.get("type") if isinstance(tool, dict) else None
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or kind != "function":
            raise PydanticCustomError("tools", 'each tool should have type "function" and a function with a name')
        if not 0 < len(name) <= MAX_TOOL_NAME_CHARACTERS:
            limit = {"limit": MAX_TOOL_NAME_CHARACTERS}
            raise PydanticCustomError("tools", "each name should have 1 to {limit} characters", limit)
        if function.get("strict") is not None and not isinstance(function["strict"], bool):
            raise PydanticCustomError("tools", "strict should be true or false")
    return value


Tools: TypeAlias = Annotated[list[dict[str, Any]] | None, BeforeValidator(_tools)]  # Any: JSON schemas
Choice: TypeAlias = Annotated[InstanceOf[ToolChoice] | None, BeforeValidator(_choice), WithJsonSchema(CHOICE_SCHEMA)]


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:  # Any: JSON schemas
    """Return the schema of each tool's arguments by its name; an empty one if the tool has none."""
    functions = [tool["function"] for tool in tools]
    return {
        function["name"]: schema if isinstance(schema := function.get("parameters"), dict) else {}
        for function in functions
    }


def reading_of(card: ModelInfo, thinking: Thinking, *, separates: bool, opens_answer: bool) -> ParsingRules:
    """Return the rules for parsing the model's output without tools.

    `separates` is False if the client requests reasoning as part of the text, `opens_answer` if the prompt does not end
    with the beginning of an answer.
    """
    if card.reasoning_style is None:
        return ParsingRules()
    match thinking.is_on:
        case None:
            begins = card.begins_with_reasoning
        case True:
            begins = card.begins_with_reasoning_on_request
        case False:
            begins = card.begins_with_reasoning_although_off
    reading = ParsingRules(
        reasoning_style=card.reasoning_style,
        begins_with_reasoning=begins and opens_answer,
        joins_reasoning=not separates,
    )
    if not opens_answer:
        return reading
    if thinking.is_on is False:
        # Where the prompt does not open reasoning, the template has taken note, and the model does not reason.
        return replace(reading, budget=0) if begins or reading.is_in_messages else reading
    by_effort = None if card.reads_reasoning_effort else EFFORT_BUDGETS.get(thinking.effort or "")
    return replace(reading, budget=by_effort if thinking.budget is None else thinking.budget)


def with_tools(
    reading: ParsingRules,
    card: ModelInfo,
    schemas: Mapping[str, dict[str, Any]],  # Any: JSON schemas
    choice: ToolChoice | None,
    *,
    in_parallel: bool,
) -> ParsingRules:
    """Return the rules for parsing outputs that may call the tools whose arguments have these `schemas`.

    The beginning of a required call is put into the prompt, so that the model can only continue it; its arguments are
    generated.

    Raises:
        InvalidRequestError: the model does not support tools, or the chosen one is not among them.
    """
    names = schemas.keys()
    wanted = choice or ToolChoice("auto")
    if wanted.mode == "required" and not names:
        raise InvalidRequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if not names or wanted.mode == "none":
        return reading
    if card.tools_problem is not None:
        message = f"'{card.name}' cannot be given tools: {card.tools_problem}."
        raise InvalidRequestError(message, param="tools")
    if card.tool_style is None:
        message = f"The chat template of '{card.name}' knows no tools; use a model whose template does."
        raise InvalidRequestError(message, param="tools")
    if wanted.name is not None and wanted.name not in names:
        raise InvalidRequestError(f"'tool_choice' names {wanted.name[:64]!r}, which is no tool.", param="tool_choice")
    return replace(
        reading,
        tool_style=card.tool_style,
        tools=schemas,
        may_call_in_parallel=in_parallel and wanted.name is None,
        prefix=call_prefix(reading, card.tool_style, wanted.name) if wanted.mode == "required" else "",
    )
