from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import common
from common.child_process import import_variables
from deploy.supervisor.process import child_environment, lines_of
from tests.waiting import is_running, wait_until

if TYPE_CHECKING:
    from pathlib import Path


async def lines(*chunks: bytes) -> list[str]:
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    return [line async for line in lines_of(stream)]


async def test_lines_are_whole_whatever_the_pieces_they_come_in() -> None:
    text = "erste Zeile\n第二行\n\nletzte".encode()
    for size in range(1, len(text)):
        assert await lines(*(text[i : i + size] for i in range(0, len(text), size))) == [
            "erste Zeile",
            "第二行",
            "letzte",
        ]


async def test_a_progress_bar_s_carriage_returns_end_lines() -> None:
    assert await lines(b"10 %\r20 %\r\n") == ["10 %", "20 %"]


async def test_bytes_that_are_no_text_do_not_stop_the_log() -> None:
    assert await lines(b"\xff\xfe\nnext\n") == ["��", "next"]


async def test_a_line_longer_than_any_buffer_passes() -> None:
    assert [len(line) for line in await lines(b"x" * 1_000_000, b"\n")] == [1_000_000]


def test_settings_in_the_environment_do_not_reach_services_past_their_file() -> None:
    environ = {
        "PANDO_SCHEDULER__ADDRESS": "elsewhere:1",
        "PANDO_MODEL": "{}",
        "PANDO_CONFIG": "other.toml",
        "PANDO_TEST_FLAG": "1",
        "PATH": "/bin",
    }
    assert child_environment(environ) == {
        "PATH": "/bin", "PANDO_TEST_FLAG": "1", "PYTHONUNBUFFERED": "1", **import_variables(environ)
    }  # fmt: skip


@pytest.mark.parametrize("present", [None, "/elsewhere"])
def test_packages_of_the_working_directory_are_not_taken_for_pandos(tmp_path: Path, present: str | None) -> None:
    for package in ("common", "deploy", "services"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('of the user')")
    environ = {"PATH": os.environ["PATH"], **({} if present is None else {"PYTHONPATH": present})}
    program = "import common, os; print(common.__file__, os.environ['PYTHONPATH'].endswith('/elsewhere'))"
    command = [sys.executable, "-c", program]
    shadowed = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert shadowed.stderr == "of the user\n"
    found = subprocess.run(
        command, cwd=tmp_path, env=child_environment(environ), capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [common.__file__, str(present is not None)]


def test_a_service_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f'[worker]\naddress = "{tmp_path / "worker.alive"}"\n')
    program = "tests.deploy.supervisor.programs.stubborn"
    script = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'deploy.supervisor.child', str(os.getpid()), {program!r}, "
        f"'--config', {str(config)!r}], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_until(lambda: (tmp_path / "worker.alive").exists())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child))
