from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.cli import main
from deploy.cli.chat.client import ChatError
from deploy.cli.chat.command import running_url
from deploy.supervisor.state import DeploymentState, write_state
from tests.fakes.openai_server import free_url

if TYPE_CHECKING:
    from tests.fakes.openai_server import FakeOpenAIServer


def test_a_prompt_is_answered_on_standard_output(server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "one two", "--system", "be brief", "--max-tokens", "3", "--temperature", "0.5"]
    assert main(["chat", "--url", server.url, *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == " w0 w1 w2\n"
    assert "3 tokens" in captured.err
    assert "0 of them cached" in captured.err
    (body,) = server.bodies
    assert [message["content"] for message in body["messages"]] == ["be brief", "one two"]
    assert (body["temperature"], body["max_tokens"]) == (0.5, 3)


def test_images_are_sent_with_the_prompt(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / name) for name in ("a.png", "b.gif")]
    for name in names:
        Path(name).write_bytes(b"x")
    flags = ["--image", names[0], "--image", names[1], "--prompt", "what?"]
    assert main(["chat", "--url", server.url, *flags]) == 0
    assert [part["type"] for part in server.bodies[0]["messages"][0]["content"]] == ["image_url", "image_url", "text"]
    assert main(["chat", "--url", server.url, "--image", str(tmp_path / "c.png"), "--prompt", "what?"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_piped_text_is_a_prompt(
    server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from\na pipe\n"))
    assert main(["chat", "--url", server.url]) == 0
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "from\na pipe"}]
    assert capsys.readouterr().out.endswith("w7\n")


def test_sessions_are_different_users_unless_named(server: FakeOpenAIServer) -> None:
    for flags in ([], [], ["--user", "ann"]):
        assert main(["chat", "--url", server.url, "--prompt", "hi", *flags]) == 0
    first, second, third = (body["user"] for body in server.bodies)
    assert first != second
    assert third == "ann"


def test_nothing_to_ask_is_an_error(
    server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--url", server.url]) == 1
    assert "there is no prompt" in capsys.readouterr().err


def test_an_unreachable_server_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    url = free_url()
    assert main(["chat", "--url", url, "--prompt", "hi"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert url in captured.err
    assert "pando up" in captured.err


def test_an_answer_that_breaks_off_fails(server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", server.url, "--model", "error-midway", "--prompt", "hi"]) == 1
    assert "the worker died" in capsys.readouterr().err


def write_deployment(root: Path, url: str) -> None:
    folder = root / url.rpartition(":")[2]
    folder.mkdir()
    write_state(folder, DeploymentState(os.getpid(), url, "tiny"))


def test_the_deployment_that_runs_here_is_the_default(tmp_path: Path) -> None:
    assert running_url(tmp_path) == "http://127.0.0.1:8000"
    write_deployment(tmp_path, "http://127.0.0.1:8123")
    assert running_url(tmp_path) == "http://127.0.0.1:8123"


def test_among_several_deployments_one_must_be_chosen_unless_one_is_the_default(tmp_path: Path) -> None:
    write_deployment(tmp_path, "http://127.0.0.1:8123")
    write_deployment(tmp_path, "http://127.0.0.1:8124")
    with pytest.raises(ChatError, match=r"8123.*8124.*--url"):
        running_url(tmp_path)
    write_deployment(tmp_path, "http://127.0.0.1:8000")
    assert running_url(tmp_path) == "http://127.0.0.1:8000"
