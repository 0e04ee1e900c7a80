"""The services that need nothing but a vocabulary, as processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from common.rpc.channel import is_serving, open_channel
from common.runtime import REFUSED_EXIT

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 300.0

pytestmark = pytest.mark.parametrize("service", ["tokenizer", "detokenizer"])


def run(service: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"services.{service}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_help_names_the_settings(service: str) -> None:
    done = run(service, "--help")
    assert done.returncode == 0
    assert f"--{service}.address" in done.stdout


def test_a_missing_model_ends_the_process_with_a_helpful_error(service: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    arguments = ("--model.reference", str(tmp_path / "missing"), f"--{service}.address", address)
    done = run(service, *arguments, "--rpc.plaintext", "true")
    assert done.returncode == REFUSED_EXIT
    assert "no such model" in done.stderr
    assert "smollm2-135m-instruct" in done.stderr


def test_an_unknown_flag_is_an_error(service: str) -> None:
    done = run(service, f"--{service}.adress", "x")
    assert done.returncode == 2


async def test_the_process_runs_until_it_is_terminated(service: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{service}", f"--{service}.address", address, "--rpc.plaintext", "true"
    )
    channel = open_channel(address)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not await is_serving(channel, ""):  # noqa: ASYNC110  (the state of another process)
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    finally:
        await channel.close()
        if process.returncode is None:
            process.kill()
