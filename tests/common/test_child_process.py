"""Child processes that answer lines of JSON: real processes, most of which misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from common.child_process import MAX_LINE_BYTES, ChildProcess
from tests.waiting import is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

START = "import json, os, signal, sys, time\nfrom common.child_process import begin_child\nanswers = begin_child()\n"
ECHO = START + "for line in sys.stdin:\n    print('noise')\n    answers.write(line)\n    answers.flush()\n"


@asynccontextmanager
async def child(program: str, *arguments: str) -> AsyncIterator[ChildProcess]:
    process = await ChildProcess.start((sys.executable, "-c", program), *arguments)
    try:
        yield process
    finally:
        await process.kill()
        assert process.has_ended


async def test_each_message_is_answered_and_what_the_child_prints_is_no_answer() -> None:
    async with child(ECHO) as process:
        for number in range(3):
            assert await process.ask({"number": number, "text": "a\nb"}, 30) == {"number": number, "text": "a\nb"}
        assert not process.has_ended


async def test_the_child_gets_the_arguments_and_the_descriptors() -> None:
    read, write = os.pipe()
    program = START + "os.write(int(sys.argv[2]), b'here')\nanswers.write('{}\\n')\n"
    process = await ChildProcess.start((sys.executable, "-c", program), str(write), descriptors=(write,))
    os.close(write)
    try:
        assert await process.ask({}, 30) == {}
        assert os.read(read, 10) == b"here"
    finally:
        os.close(read)
        await process.kill()


async def test_a_child_that_ends_is_noticed() -> None:
    async with child(START + "sys.stdin.readline()\n") as process:
        with pytest.raises(OSError, match="ended"):
            await process.ask({}, 30)


@pytest.mark.parametrize("answer", ["{", "[1]", "x" * (MAX_LINE_BYTES + 1)])
async def test_a_malformed_answer_is_an_error(answer: str) -> None:
    async with child(START + f"answers.write({answer!r} + '\\n')\nanswers.flush()\ntime.sleep(600)\n") as process:
        with pytest.raises(ValueError):  # noqa: PT011  (json's, asyncio's or ours)
            await process.ask({}, 30)


async def test_a_child_that_hangs_and_ignores_signals_is_killed() -> None:
    program = START + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nanswers.write('{}\\n')\nanswers.flush()\n"
    async with child(program + "time.sleep(600)\n") as process:
        assert await process.ask({}, 30) == {}
        with pytest.raises(TimeoutError):
            await process.ask({}, 0.2)
        os.kill(process.pid, signal.SIGTERM)
        assert is_running(process.pid)
        await process.kill()
        assert not is_running(process.pid)


HANGING = START + "answers.write('{}\\n')\nanswers.flush()\ntime.sleep(600)\n"
PARENT = f"""
import asyncio, sys
from common.child_process import ChildProcess

async def main():
    process = await ChildProcess.start((sys.executable, "-c", {HANGING!r}))
    await process.ask({{}}, 60)
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_child_that_hangs_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(pid))
