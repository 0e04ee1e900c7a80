"""`pando up` as a person runs it."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from deploy.supervisor.layout import free_port
from tests.waiting import is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Up:
    """A running `pando up` and what it has written."""

    def __init__(self, *arguments: str, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        wait_until(
            lambda: text in self.output or self.process.poll() is not None,
            timeout_s,
            lambda: f"{text!r} in {self.output}",
        )
        assert text in self.output, self.output

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=120)


@pytest.fixture
def runtime(run_root: Path) -> dict[str, str]:
    folder = run_root / f"xdg-{time.monotonic_ns() % 1_000_000}"
    folder.mkdir(mode=0o700)
    return {"XDG_RUNTIME_DIR": str(folder)}


@pytest.fixture
def up(runtime: dict[str, str]) -> Iterator[Up]:
    running = Up("--port", str(free_port("127.0.0.1")), "--model.load_format", "fake", environ=runtime)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest.mark.slow
def test_up_shows_a_working_curl_command_and_ends_cleanly_after_open_streams_on_ctrl_c(
    up: Up, runtime: dict[str, str]
) -> None:
    up.wait_for("Press Ctrl-C to stop")
    children = children_of(up.process.pid)
    assert len(children) == 5
    # The shown command, run by a shell as a person would paste it.
    start = next(i for i, line in enumerate(up.lines) if line.strip().startswith("curl "))
    command = "\n".join(up.lines[start : start + 2])
    answer = subprocess.run(["bash", "-c", command.replace("curl ", "curl -sS ", 1)], capture_output=True, text=True)
    if answer.returncode != 127:  # this machine has curl
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
    state = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "state"], capture_output=True, text=True, env={**os.environ, **runtime}
    )
    assert "READY" in state.stdout, state.stderr
    with long_stream(up) as lines:
        up.process.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert up.process.wait(timeout=120) == 0
    assert not [pid for pid in children if is_running(pid)]
    assert not list(Path(runtime["XDG_RUNTIME_DIR"]).rglob("*.sock"))
    # Lines carry their service's name.
    prefixes = {line.split("|")[0].strip() for line in up.lines if "|" in line}
    assert {"gateway", "tokenizer", "scheduler", "worker", "detokenizer", "pando"} <= prefixes


def test_services_die_when_pando_up_is_killed(up: Up) -> None:
    up.wait_for("Press Ctrl-C to stop")
    children = children_of(up.process.pid)
    up.end(signal.SIGKILL)
    wait_until(lambda: not [pid for pid in children if is_running(pid)], timeout_s=120)


@contextmanager
def long_stream(up: Up) -> Iterator[Iterator[str]]:
    """Open a stream of thousands of tokens, of which the first has come."""
    up.wait_for("Press Ctrl-C to stop")
    url = next(word for line in up.lines for word in line.split() if word.startswith("http://")).removesuffix("/v1")
    body = {"model": "smollm2-135m-instruct", "prompt": "Hi", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def test_two_termination_signals_in_quick_succession_let_a_stream_finish(up: Up) -> None:
    with long_stream(up) as lines:
        up.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        up.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert up.process.wait(timeout=120) == 0


def test_a_taken_port_is_an_error_that_names_the_flag(runtime: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = Up("--port", str(taken.getsockname()[1]), "--model.load_format", "fake", environ=runtime)
        assert up.process.wait(timeout=120) == 2
    wait_until(lambda: "--port" in up.output, timeout_s=120)


def test_a_chat_template_replaces_the_models_own(tmp_path: Path, runtime: dict[str, str]) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}")
    port = str(free_port("127.0.0.1"))
    up = Up("--port", port, "--model.load_format", "fake", "--chat-template", str(file), environ=runtime)
    up.wait_for("Press Ctrl-C to stop")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
        tokens = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hello"}]}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "[user] Hello"
    assert up.end() == 0


@pytest.mark.extended
def test_a_broken_chat_template_ends_it_with_the_reason(tmp_path: Path, runtime: dict[str, str]) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}\n{{ message.content }}")
    port = str(free_port("127.0.0.1"))
    up = Up("--port", port, "--model.load_format", "fake", "--chat-template", str(file), environ=runtime)
    assert up.process.wait(timeout=120) == 1
    wait_until(lambda: "model.chat_template: line 2" in up.output, timeout_s=120, what=lambda: up.output)


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(tmp_path: Path, runtime: dict[str, str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"this is no GGUF file")
    up = Up("--port", str(free_port("127.0.0.1")), "--model", str(broken), environ=runtime)
    assert up.process.wait(timeout=120) == 1
    wait_until(lambda: "the end of its log" in up.output, timeout_s=120)
