"""Conversations of every order through chat templates: in the shapes of published ones, and in a folder of real ones.

    .venv/bin/python -m pytest tests/services/tokenizer/test_published_templates.py --chat-templates FOLDER

adds each `*.jinja` file in FOLDER, such as those that llama.cpp and vLLM have in their repositories.
"""

from __future__ import annotations

import json
from datetime import datetime
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from transformers.utils import chat_template_utils

from common.errors import InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from common.types import ToolStyle
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.template_style import TemplateStyle, style_of
from tests.services.tokenizer.template_shapes import LEAVES_CALLS_OUT, SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "A word"},
                "count": {"type": "integer", "description": "A number"},
                "flag": {"type": "boolean", "description": "A flag"},
            },
            "required": ["word", "count", "flag"],
        },
    },
}
# s: system, u: user, a: assistant; others than these are refused by some templates, and not by others.
ORDERS = ("u", "su", "uau", "suau", "uauau", "uu", "uaau", "sa", "ua", "usu", "ss", "auau")
ALTERNATING = ("u", "uau", "uauau")


class _FixedTime(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> _FixedTime:
        return cls(2026, 1, 2, 3, 4, 5)


class Published:
    """A template with the style that is found for it."""

    def __init__(self, source: str, tools: str = "auto") -> None:
        self.source = source
        self.templates = ChatTemplates({"default": source}, SPECIAL, now=_FixedTime.now)
        self.style: TemplateStyle = style_of({"default": source}, self.templates, tools, "auto")

    def render(self, messages: Sequence[ChatMessage], *, has_tools: bool = False, opens: bool = True) -> str:
        """Render as the tokenizer does."""
        style = self.style
        return self.templates.render(
            ChatPrompt(tuple(messages), (json.dumps(TOOL),) if has_tools else (), add_generation_prompt=opens),
            takes_arguments_as_text=style.takes_arguments_as_text, has_single_calls=style.has_single_calls,
            takes_parts=style.takes_parts, tool_style=style.tools,
        )  # fmt: skip

    def by_transformers(self, messages: Sequence[ChatMessage], *, has_tools: bool = False, opens: bool = True) -> str:
        """Render as `transformers` does for callers that write absent contents as empty ones."""
        rendered: list[str] = chat_template_utils.render_jinja_template(
            [[_plain(message) for message in messages]],
            tools=[TOOL] if has_tools else None, chat_template=self.source, add_generation_prompt=opens, **SPECIAL,
        )[0]  # fmt: skip
        return rendered[0]


def _plain(message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls_json is not None:
        plain["tool_calls"] = json.loads(message.tool_calls_json)
        for call in plain["tool_calls"]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "published" in metafunc.fixturenames:
        folder: Path | None = metafunc.config.getoption("--chat-templates")
        sources = dict(SHAPES)
        if folder is not None:
            real = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
            assert real, f"no *.jinja in {folder}"
            sources |= real
        metafunc.parametrize("published", list(sources.values()), ids=list(sources), indirect=True)


@pytest.fixture
def published(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setattr(chat_template_utils, "datetime", _FixedTime)
    return Published(request.param)


def conversation(order: str) -> list[ChatMessage]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [ChatMessage(roles[letter], f"turn-{i}-of-{roles[letter]}") for i, letter in enumerate(order)]


def in_order(texts: Sequence[str], rendered: str) -> bool:
    """Whether each text is there, each after the one before."""
    at = 0
    for text in texts:
        at = rendered.find(text, at)
        if at < 0:
            return False
        at += len(text)
    return True


@pytest.mark.parametrize("has_tools", [False, True])
def test_each_order_of_turns_is_rendered_as_transformers_does_or_refused(
    published: Published, *, has_tools: bool
) -> None:
    rendered = {}
    for order in ORDERS:
        messages = conversation(order)
        try:
            rendered[order] = published.render(messages, has_tools=has_tools)
        except InvalidRequestError:
            with pytest.raises(Exception):  # noqa: B017, PT011  (whatever templates raise)
                published.by_transformers(messages, has_tools=has_tools)
            continue
        if not published.style.takes_parts:
            assert rendered[order] == published.by_transformers(messages, has_tools=has_tools), order
    for order in rendered.keys() & set(ALTERNATING):
        assert in_order([str(each.content) for each in conversation(order)], rendered[order]), order
    # Some real templates render nothing without tools, or without variables of their own.
    if published.source in SHAPES.values():
        assert rendered.keys() >= set(ALTERNATING)


def calls(count: int) -> list[dict[str, Any]]:
    arguments = [{"word": f"wörd-{i} <x> {{y}}", "count": 7 + i, "flag": True} for i in range(count)]
    return [
        {"id": f"call_abc{i}", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(each)}}
        for i, each in enumerate(arguments)
    ]


def round_trip(count: int, content: str | None) -> list[ChatMessage]:
    """Return a conversation with calls, their results, an answer and another question."""
    return [
        ChatMessage("user", "first-question"),
        ChatMessage("assistant", content, tool_calls_json=json.dumps(calls(count))),
        *(ChatMessage("tool", f"result-{i}", tool_call_id=f"call_abc{i}") for i in range(count)),
        ChatMessage("assistant", "first-answer"),
        ChatMessage("user", "second-question"),
    ]


@pytest.mark.parametrize(("count", "content"), list(product((1, 2), (None, "", "Let me see."))))
def test_calls_and_their_results_are_shown_in_their_order(
    published: Published, count: int, content: str | None
) -> None:
    messages = round_trip(count, content)
    if published.style.tools is None:
        pytest.skip("tools are refused, or the template has none")
    expected = [
        "first-question",
        *(text for i in range(count) for text in ("look_up", f"rd-{i} <x> {{y}}", f"{7 + i}")),
        *(f"result-{i}" for i in range(count)),
    ]
    if published.style.has_single_calls:
        pairs = ([f"rd-{i} <x> {{y}}", f"result-{i}"] for i in range(count))
        expected = ["first-question", *(text for pair in pairs for text in pair)]
    waiting = published.render(messages[:-2], has_tools=True)
    whole = published.render(messages, has_tools=True)
    if published.style.tools is not ToolStyle.GEMMA:  # which sorts arguments
        assert in_order(expected, waiting[waiting.index("first-question") :])
    assert in_order(["first-question", "first-answer", "second-question"], whole)
    assert all(text in waiting for text in expected)
    for text in (f"result-{i}" for i in range(count)):
        assert waiting.count(text) == whole.count(text) == 1


def test_a_template_that_leaves_calls_out_is_rendered_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _FixedTime)
    found = Published(LEAVES_CALLS_OUT)
    assert found.style.tools is None
    assert found.style.tools_problem is not None
    assert (
        "leaves earlier tool calls out, so that their notation is not found; set model.tool_style"
        in found.style.tools_problem
    )
    told = Published(LEAVES_CALLS_OUT, "granite")
    assert (told.style.tools, told.style.tools_problem) == (ToolStyle.GRANITE, None)
    for count, content in product((1, 2), (None, "", "Let me see.")):
        messages = round_trip(count, content)
        rendered = told.render(messages, has_tools=True)
        assert rendered == told.by_transformers(messages, has_tools=True)
        assert "rd-0" not in rendered
        assert in_order(["first-question", content or "", *(f"result-{i}" for i in range(count))], rendered)
