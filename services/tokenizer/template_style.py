"""What a chat template tells of its model: how it writes tool calls, and whether it thinks aloud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from common.errors import InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from common.types import ToolStyle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.tokenizer.chat_template import ChatTemplates

# The first one that occurs decides: templates explain the notation to their models.
_MARKS: Final = (
    ("[TOOL_CALLS]", ToolStyle.MISTRAL),
    ("<tool_call>", ToolStyle.HERMES),
    ("func_name1(", ToolStyle.PYTHONIC),
    ("<|python_tag|>", ToolStyle.LLAMA3),
    ('"parameters": dictionary', ToolStyle.LLAMA3),
)
_PROBE: Final = ChatPrompt((ChatMessage("user", "Hello"),))


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """How answers to a template's prompts are to be read."""

    tools: ToolStyle | None = None
    has_reasoning: bool = False
    # The prompt ends inside the block, so that the answer does not open it.
    begins_with_reasoning: bool = False


def style_of(sources: Mapping[str, str], templates: ChatTemplates, tools: str, reasoning: str) -> TemplateStyle:
    """Return the style of the templates `sources`; `tools` and `reasoning` are settings, "auto" or what to take."""
    source = sources.get("tool_use") or sources.get("default", "")
    has_reasoning = "</think>" in source if reasoning == "auto" else reasoning == "think"
    return TemplateStyle(_tools(source, tools), has_reasoning, has_reasoning and _opens_reasoning(templates))


def _tools(source: str, setting: str) -> ToolStyle | None:
    if setting != "auto":
        return None if setting == "none" else ToolStyle(setting)
    if "tools" not in source:
        return None
    return next((style for mark, style in _MARKS if mark in source), None)


def _opens_reasoning(templates: ChatTemplates) -> bool:
    try:
        return templates.render(_PROBE).rstrip().endswith("<think>")
    except InvalidRequestError:
        return False
