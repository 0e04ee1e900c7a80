"""Derives the notation of tool calls and the use of reasoning from a model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from common.errors import InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from common.types import ToolStyle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.tokenizer.chat_template import ChatTemplates

# The first match decides: templates explain the notation to their models.
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
    """The notation of outputs for a template's prompts."""

    tools: ToolStyle | None = None
    has_reasoning: bool = False
    # The prompt ends inside the reasoning block, so the output does not open it.
    begins_with_reasoning: bool = False


def style_of(sources: Mapping[str, str], templates: ChatTemplates, tools: str, reasoning: str) -> TemplateStyle:
    """Return the style of the templates `sources`; the settings `tools` and `reasoning` override it unless "auto"."""
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
