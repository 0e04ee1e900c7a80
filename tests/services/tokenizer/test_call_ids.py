"""Clients of any API can send calls back, whatever ids their API has."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from common.requests import ChatMessage, ChatPrompt
from common.types import ToolStyle
from services.tokenizer.chat_template import ChatTemplates, with_accepted_ids, with_single_calls
from tests.common.notations.templates import TEMPLATES

MESSAGES: list[dict[str, Any]] = [  # Any: free JSON
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "tool_calls": [
        {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "call_2", "type": "function", "function": {"name": "get", "arguments": {}}},
    ]},
    {"role": "tool", "tool_call_id": "call_2", "content": "2"},
    {"role": "tool", "tool_call_id": "toolu_1", "content": "1"},
]  # fmt: skip


def test_messages_of_several_calls_are_divided_and_no_result_is_lost() -> None:
    stray = {"role": "tool", "tool_call_id": "other", "content": "3"}
    user, asked, second, first = MESSAGES
    calls = asked["tool_calls"]
    divided = with_single_calls([user, {**asked, "content": "I look."}, second, stray, first, user])
    assert divided == [
        user,
        {"role": "assistant", "content": "I look.", "tool_calls": calls[:1]},
        first,
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        second,
        stray,
        user,
    ]
    assert with_single_calls(divided) == divided


def test_kimi_s_ids_have_the_name_of_the_tool_and_a_number() -> None:
    _, calls, second, first = with_accepted_ids(MESSAGES, ToolStyle.KIMI_K2)
    assert [call["id"] for call in calls["tool_calls"]] == ["functions.add:0", "functions.get:1"]
    assert (first["tool_call_id"], second["tool_call_id"]) == ("functions.add:0", "functions.get:1")


@pytest.mark.parametrize("style", [ToolStyle.MISTRAL, ToolStyle.MISTRAL_ARGS])
def test_mistral_s_ids_have_nine_letters_and_digits(style: ToolStyle) -> None:
    _, calls, second, first = with_accepted_ids(MESSAGES, style)
    ids = [call["id"] for call in calls["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id_) for id_ in ids)
    assert [first["tool_call_id"], second["tool_call_id"]] == ids


def test_accepted_ids_and_those_of_other_notations_stay() -> None:
    assert with_accepted_ids(MESSAGES, ToolStyle.HERMES) == MESSAGES
    assert with_accepted_ids(MESSAGES, None) == MESSAGES
    kept = json.loads(json.dumps(MESSAGES).replace("toolu_1", "functions.add:7").replace("call_2", "functions.get:8"))
    assert with_accepted_ids(kept, ToolStyle.KIMI_K2) == kept


def test_a_conversation_of_another_api_is_rendered_with_the_ids_of_the_notation() -> None:
    calls = json.dumps(MESSAGES[1]["tool_calls"])
    chat = ChatPrompt((ChatMessage("user", "Hi"), ChatMessage("assistant", None, tool_calls_json=calls)))
    for style, shown in ((ToolStyle.KIMI_K2, "functions.get:1"), (ToolStyle.MISTRAL, '"name": "get"')):
        text = ChatTemplates({"default": TEMPLATES[style]}, {}).render(chat, tool_style=style)
        assert shown in text
