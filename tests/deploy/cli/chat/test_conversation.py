from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.cli.chat.client import ChatError, ChatHistory, ChatImage

if TYPE_CHECKING:
    from pathlib import Path


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


def test_images_go_before_the_text_of_the_next_message_only(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    (tmp_path / "b.JPG").write_bytes(b"jpeg")
    talk = ChatHistory(images=[ChatImage.read(tmp_path / name) for name in ("a.png", "b.JPG")])
    [message] = talk.ask("what?")
    urls = [part["image_url"]["url"] for part in message["content"][:2]]
    assert urls == ["data:image/png;base64,cG5n", "data:image/jpeg;base64,anBlZw=="]
    assert message["content"][2] == {"type": "text", "text": "what?"}
    talk.answer("a cat")
    assert talk.ask("sure?")[-1] == {"role": "user", "content": "sure?"}


@pytest.mark.parametrize("name", ["missing.png", "text.txt", "."])
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(ChatError, match=name.replace(".", r"\.") if name != "." else "image"):
        ChatImage.read(tmp_path / name)
