from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

import pytest

from common.settings.sources import known_settings
from deploy.cli import COMMANDS, main
from deploy.supervisor import command as up

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    name = getattr(command, "name", "")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"pando {name}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.name != "up"], ids=lambda command: command.name)
def test_every_command_has_the_agreed_face(command: object) -> None:
    module = importlib.import_module(getattr(command, "module", ""))
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2
    assert "fly" in capsys.readouterr().err


def test_the_help_of_up_shows_the_settings_that_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(up.COMMON_SETTINGS) == 21
    with pytest.raises(SystemExit) as ended:
        main(["up", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert re.findall(r"--(\w+(?:\.\w+)+|models) ", shown.partition("options:")[2]) == list(up.COMMON_SETTINGS)
    assert "--tp N" in shown
    assert "--help-all" in shown


def test_the_long_help_of_up_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--help-all"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert len(known_settings()) > 100
    assert [name for name in known_settings() if f"--{name}" not in shown] == []


def test_shortcuts_stand_for_settings() -> None:
    settings, arguments = up.read_arguments(["--model", "a.gguf", "--port=8123", "--tp", "2", "--host", "::1"])
    assert (settings.model.reference, settings.gateway.port, settings.gateway.host) == ("a.gguf", 8123, "::1")
    assert arguments.tp == 2


def test_a_chat_template_is_a_file_or_text() -> None:
    for given in ("chat.jinja", "{{ messages[0].content }}", "{% for message in messages %}{{ message }}{% endfor %}"):
        assert up.read_arguments(["--chat-template", given])[0].model.chat_template == given


def test_a_chat_template_that_does_not_exist_is_reported_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--chat-template", "/does/not/exist.jinja"]) == 2
    assert "model.chat_template: there is no file /does/not/exist.jinja" in capsys.readouterr().err


def test_a_wrong_model_is_reported_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "/does/not/exist"]) == 2
    assert "/does/not/exist" in capsys.readouterr().err


def test_an_unknown_setting_in_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pando.toml"
    file.write_text("[scheduler]\ncolour = 3\n")
    assert main(["up", "--config", str(file)]) == 2
    assert "scheduler.colour" in capsys.readouterr().err


def test_an_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--scheduler.colour", "3"])
    assert ended.value.code == 2
    written = capsys.readouterr().err
    assert "--scheduler.colour" in written
    assert "--help-all lists all" in written
