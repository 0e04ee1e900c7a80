"""Child processes that are killed when their parent ends, and those that answer lines of JSON: both sides."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_LINE_BYTES = 1 << 16
# The two ends of a connection agree on the fields.
JsonMessage = dict[str, Any]
PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A running child process, which answers each message with one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use a process whose standard input and output are pipes."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._output = process.stdout

    @classmethod
    async def start(cls, command: Sequence[str], *arguments: str, descriptors: Sequence[int] = ()) -> ChildProcess:
        """Run `command` with this process's id and `arguments`; the child inherits the file `descriptors`.

        Raises:
            OSError: it cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            str(os.getpid()),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            pass_fds=tuple(descriptors),
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    async def ask(self, message: Mapping[str, Any], timeout_s: float) -> JsonMessage:
        """Send a message and return the answer. After an error the process must be killed: its answer may still come.

        Raises:
            TimeoutError: the answer takes too long.
            OSError: the process has ended.
            ValueError: the answer is malformed, or longer than `MAX_LINE_BYTES`.
        """
        async with asyncio.timeout(timeout_s):
            await write_message(self._input, message)
            return await read_message(self._output)

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.shield(self._process.wait())


def import_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which `python -m` imports Pando's packages from where this process has them.

    By itself it looks in the working directory first, where a user may have packages that are called `common` or
    `services`, too.
    """
    root = str(Path(__file__).resolve().parents[1])
    variables = {"PYTHONSAFEPATH": "1"}
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    return variables


async def write_message(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Write one message.

    Raises:
        OSError: the other end is closed.
    """
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def read_message(reader: asyncio.StreamReader) -> JsonMessage:
    """Read one message.

    Raises:
        OSError: the other end is closed.
        ValueError: the line is no JSON object, or too long.
    """
    line = await reader.readline()
    if not line:
        raise ConnectionError("the child process has ended")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"the child process did not answer with an object: {line[:80]!r}")
    return message


def begin_child() -> TextIO:
    """Tie this process to the parent that `sys.argv` names, and return the stream for answers.

    Standard output becomes standard error, so that a library that prints cannot forge an answer.
    """
    # Standard input ends with the parent, but a child that hangs would not notice.
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent` ends for any reason, SIGKILL included; no effect outside Linux.

    The child calls this itself: code between fork and exec would need a plain fork, which is unsafe in a process that
    runs gRPC.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        sys.exit(f"the parent process (pid {parent}) has ended")
