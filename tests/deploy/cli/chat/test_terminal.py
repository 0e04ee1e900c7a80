from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from deploy.cli.chat.client import ChatClient, ChatError, ChatHistory, ChatOptions, StreamedAnswer
from deploy.cli.chat.command import Terminal, describe, printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deploy.cli.chat.client import HistoryMessage


class ScriptedClient(ChatClient):
    """Answers from a list; an exception in it is raised after what came before it."""

    def __init__(self, *answers: list[str | BaseException]) -> None:
        super().__init__("http://scripted")
        self.answers = list(answers)
        self.asked: list[list[HistoryMessage]] = []

    def ask(
        self, messages: list[HistoryMessage], options: ChatOptions, on_text: Callable[[str], None]
    ) -> StreamedAnswer:
        self.asked.append([dict(message) for message in messages])
        answer = StreamedAnswer(0.0, first_s=0.5, last_s=2.5, finish_reason="stop", completion_tokens=5)
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            answer.pieces.append(piece)
            on_text(piece)
        return answer


def chat(client: ScriptedClient, *lines: str | BaseException, system: str | None = None) -> str:
    script = iter(lines)

    def read_line() -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    shown = io.StringIO()
    console = Console(file=shown, width=200)
    Terminal(client, ChatOptions("tiny", "ann"), ChatHistory(system), console, read_line).run()
    return shown.getvalue()


def test_a_conversation_grows_and_each_answer_has_its_figures() -> None:
    client = ScriptedClient(["Hel", "lo"], ["Bye"])
    shown = chat(client, "hi", "", "  bye ", "/quit")
    assert "Hello\n" in shown
    assert shown.count("2.0 tokens/s") == 2
    assert [message["content"] for message in client.asked[1]] == ["hi", "Hello", "bye"]


def test_reset_and_system_start_a_new_conversation() -> None:
    client = ScriptedClient(["a"], ["b"], ["c"], ["d"])
    chat(client, "1", "/reset", "2", "/system be kind", "3", "/system", "4", system="old")
    contents = [[message["content"] for message in asked] for asked in client.asked]
    assert contents == [["old", "1"], ["old", "2"], ["be kind", "3"], ["4"]]


def test_an_image_goes_with_the_next_message(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(b"png")
    client = ScriptedClient(["A cat."], ["Yes."])
    shown = chat(client, f"/image {tmp_path}/a b.png", "/image", f"/image {tmp_path}/none.png", "what?", "sure?")
    assert "a b.png goes with the next message" in shown
    assert "needs the name of a file" in shown
    assert "none.png cannot be read" in shown.replace("\n", "")
    assert [len(asked[0]["content"]) for asked in client.asked] == [2, 2]
    assert client.asked[1][2]["content"] == "sure?"


def test_ctrl_c_stops_the_answer_and_keeps_the_session() -> None:
    client = ScriptedClient(["Once upon", KeyboardInterrupt()], ["so"])
    shown = chat(client, "a story", "go on")
    assert "stopped" in shown
    assert [message["content"] for message in client.asked[1]] == ["a story", "Once upon", "go on"]


def test_a_failed_question_can_be_asked_again() -> None:
    client = ScriptedClient([ChatError("no server [at] all")], ["fine"])
    shown = chat(client, "hi", "hi")
    assert "no server [at] all" in shown
    assert [message["content"] for message in client.asked[1]] == ["hi"]


def test_ctrl_c_at_the_prompt_explains_how_to_quit() -> None:
    client = ScriptedClient(["yes"])
    shown = chat(client, KeyboardInterrupt(), "still there?", EOFError())
    assert "/quit" in shown
    assert "yes" in shown


def test_unknown_commands_send_no_request() -> None:
    client = ScriptedClient()
    shown = chat(client, "/dance", "/help", "/exit")
    assert "unknown command /dance" in shown
    assert "/reset" in shown
    assert client.asked == []


def test_models_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\x07b\r\n\té中🙂") == "a[2Jb\n\té中🙂"
    assert "\x1b" not in chat(ScriptedClient(["\x1b]0;owned\x07hi"]), "hi")


def test_markup_in_answers_is_text() -> None:
    assert "[bold]x[/bold] [1, 2]" in chat(ScriptedClient(["[bold]x[/bold] ", "[1, 2]"]), "hi")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (StreamedAnswer(0.0), ""),
        (
            StreamedAnswer(1.0, [], 1.25, 2.25, "length", 40, 11, 32),
            "11 tokens · 10.0 tokens/s · first token after 250 ms · prompt 40 tokens, 32 of them cached · "
            "cut at the token limit",
        ),
        (StreamedAnswer(1.0, [], 1.25, 1.25, "stop", 40, 1), "1 tokens · first token after 250 ms · prompt 40 tokens"),
    ],
)
def test_the_description_contains_only_the_known_figures(answer: StreamedAnswer, shown: str) -> None:
    assert describe(answer) == shown
