"""Tools, the choice between them, and the rules for parsing outputs with calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, InstanceOf, WithJsonSchema
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from gateway.parsing.answers import Reading, call_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.types import ToolStyle
    from gateway.pipeline.messages import ModelInfo

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


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:  # Any: JSON schemas
    """Return the names of `tools`, in their order."""
    return [tool["function"]["name"] for tool in tools]


def reading_of(card: ModelInfo, *, thinks: bool, opens_thought: bool) -> Reading:
    """Return the rules for parsing the model's output without tools.

    `thinks` is False if the client requests reasoning as part of the text. `opens_thought` is False if this prompt does
    not open a reasoning block although the model's template can.
    """
    has_reasoning = card.has_reasoning and thinks
    return Reading(
        has_reasoning=has_reasoning,
        begins_with_reasoning=has_reasoning and card.begins_with_reasoning and opens_thought,
    )


def with_tools(
    reading: Reading, card: ModelInfo, names: Sequence[str], choice: ToolChoice | None, *, in_parallel: bool
) -> Reading:
    """Return the rules for parsing outputs that may call the tools `names`.

    The beginning of a required call is put into the prompt, so that the model can only continue it; its arguments are
    generated.

    Raises:
        InvalidRequestError: the model does not support tools, or the chosen one is not among them.
    """
    wanted = choice or ToolChoice("auto")
    if wanted.mode == "required" and not names:
        raise InvalidRequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if not names or wanted.mode == "none":
        return reading
    if card.tool_style is None:
        raise InvalidRequestError(f"The chat template of '{card.name}' knows no tools.", param="tools")
    if wanted.name is not None and wanted.name not in names:
        raise InvalidRequestError(f"'tool_choice' names {wanted.name[:64]!r}, which is no tool.", param="tool_choice")
    return replace(
        reading,
        tool_style=card.tool_style,
        tools=frozenset(names),
        may_call_in_parallel=in_parallel and wanted.name is None,
        prefix=_prefix(reading, card.tool_style, wanted),
    )


def _prefix(reading: Reading, style: ToolStyle, choice: ToolChoice) -> str:
    if choice.mode != "required":
        return ""
    return call_prefix(style, choice.name, begins_with_reasoning=reading.begins_with_reasoning)
