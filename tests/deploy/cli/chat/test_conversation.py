from __future__ import annotations

from deploy.cli.chat.client import ChatHistory


def test_turns_follow_the_system_prompt() -> None:
    talk = ChatHistory("be brief")
    talk.ask("hi")
    talk.answer("hello")
    assert [message["role"] for message in talk.ask("again")] == ["system", "user", "assistant", "user"]


def test_a_question_without_an_answer_is_removed() -> None:
    talk = ChatHistory()
    talk.ask("hi")
    talk.answer("")
    assert talk.messages == []


def test_reset_keeps_the_system_prompt() -> None:
    talk = ChatHistory("be brief")
    talk.ask("hi")
    talk.answer("hello")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]
