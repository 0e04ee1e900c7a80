from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from common.settings import Settings
from deploy.supervisor.console import ConsoleReporter, JsonReporter, banner
from deploy.supervisor.layout import plan_layout
from deploy.supervisor.supervisor import ServiceFailedError

NAMES = ["worker", "gateway"]
LAYOUT = plan_layout(Settings(), Path("/run/pando/8000"))
FAILURE = ServiceFailedError("worker", "died", ('{"event": "weights.broken", "level": "error"}', "plain words"))


def reporter(*, terminal: bool) -> tuple[ConsoleReporter, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    return ConsoleReporter(NAMES, console), output


@pytest.mark.parametrize("terminal", [True, False])
def test_the_banner_s_curl_is_whole_and_for_the_served_model(terminal: bool) -> None:
    shown, output = reporter(terminal=terminal)
    shown.ready(LAYOUT)
    text = output.getvalue()
    assert f"curl {LAYOUT.url}/v1/chat/completions" in text
    body = text.split("-d '")[1].split("'")[0]
    assert json.loads(body)["model"] == LAYOUT.model


def test_the_banner_names_a_command_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "pando"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert "  bin/pando chat --url" in banner(LAYOUT)
    monkeypatch.setenv("PATH", str(program.parent))
    assert "  pando chat --url" in banner(LAYOUT)


def test_markup_in_a_service_s_output_is_shown_unchanged() -> None:
    shown, output = reporter(terminal=False)
    shown.line("worker", "[bold]not markup[/bold]")
    assert output.getvalue() == "      worker | [bold]not markup[/bold]\n"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("field", ["event", "path", "names", "exception", None])
def test_texts_of_clients_neither_control_a_terminal_nor_look_like_lines(terminal: bool, field: str | None) -> None:
    text = "\x1b]0;title\x07\x9b2J\u202e\rworker:model.loaded\n"
    event = {"event": "request.finished", "level": "info"}
    shown, output = reporter(terminal=terminal)
    if field is None:
        shown.line("gateway", text.rstrip())
    else:
        shown.line("gateway", json.dumps({**event, field: [text] if field == "names" else text}))
    written = output.getvalue()
    assert "title" in written
    assert not [each for each in ("\x1b]", "\x07", "\x9b", "\u202e", "\r") if each in written]
    assert all("gateway" in line for line in written.splitlines())


def test_progress_moves_a_bar_on_a_terminal_and_is_a_line_elsewhere() -> None:
    event = json.dumps({"event": "worker.configuring", "percent": 40, "stage": "weights"})
    on_terminal, output = reporter(terminal=True)
    on_terminal.begin()
    on_terminal.line("scheduler", event)
    on_terminal.end()
    assert "percent=40" not in output.getvalue()
    plain, output = reporter(terminal=False)
    plain.begin()
    plain.line("scheduler", event)
    plain.end()
    assert "percent=40" in output.getvalue()


def test_a_failure_shows_the_end_of_the_culprit_s_log() -> None:
    shown, output = reporter(terminal=False)
    shown.failed(FAILURE)
    assert "worker died; the end of its log:" in output.getvalue()
    assert "worker | ERROR weights.broken" in output.getvalue()
    assert "worker | plain words" in output.getvalue()


def test_json_output_is_json_in_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = JsonReporter()
    shown.begin()
    shown.line("worker", '{"event": "a", "service": "worker"}')
    shown.line("worker", "Segmentation fault")
    shown.note("worker died")
    shown.ready(LAYOUT)
    shown.failed(FAILURE)
    shown.end()
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["event"] for event in events] == [
        "a",
        "Segmentation fault",
        "worker died",
        "deployment.ready",
        "deployment.failed",
    ]
    assert all("service" in event for event in events)


def test_the_banner_quotes_a_model_s_name_safely() -> None:
    settings = Settings()
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"served_name": 'a"b'})})
    body = banner(plan_layout(settings, Path("/run/pando/8000"))).split("-d '")[1].split("'")[0]
    assert json.loads(body)["model"] == 'a"b'


def test_the_banner_of_an_encoder_asks_for_embeddings() -> None:
    settings = Settings()
    settings = settings.model_copy(
        update={"model": settings.model.model_copy(update={"reference": "all-minilm-l6-v2"})}
    )
    text = banner(plan_layout(settings, Path("/run/pando/8000")))
    assert "/v1/embeddings" in text
    assert "chat" not in text
    assert json.loads(text.split("-d '")[1].split("'")[0])["model"] == "all-minilm-l6-v2"
