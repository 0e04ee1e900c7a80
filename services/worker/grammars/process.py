"""Processes that compile one grammar each, and that can be killed: a thread that compiles could not be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

from common.child_process import MAX_LINE_BYTES, ChildProcess, read_message, write_message
from common.errors import InvalidRequestError, UnavailableError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from common.grammars import Grammar
    from services.worker.engine.grammars.vocabulary_source import VocabularySource

# Importing and loading a vocabulary takes seconds on a slow machine, a fork milliseconds.
START_TIMEOUT_S = 120.0
FORK_TIMEOUT_S = 30.0
COMMAND = (sys.executable, "-m", "services.worker.grammars.template")
LIBRARY = "xgrammar"


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The outcome of a compilation: `data`, or the reason in `refusal`."""

    refusal: str | None
    elapsed_us: int = 0
    # The compiled grammar as `Compiler.load` reads it.
    data: bytes = b""
    # Whether another attempt would end alike; other work may have slowed down one that took too long.
    is_final: bool = True


class CompileProcess:
    """A forked process, for one grammar."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use the process at the other end of a connection."""
        self.pid = pid
        self._reader = reader
        self._writer = writer

    async def compile(self, grammar: Grammar) -> CompileResult:
        """Compile a grammar and try it out; the caller kills the process afterwards."""
        try:
            await write_message(self._writer, {"kind": grammar.kind.value, "text": grammar.text})
            answer = await read_message(self._reader)
            data = await self._reader.readexactly(int(answer["bytes"]))
        except (OSError, ValueError, asyncio.IncompleteReadError):
            get_logger("grammars").warning("grammars.process_died", kind=grammar.kind.value, bytes=len(grammar.text))
            return CompileResult("it takes too much memory to compile")
        return CompileResult(answer.get("refusal"), int(answer["elapsed_us"]), data)

    def cpu_seconds(self) -> float | None:
        """Return the processor time that it has used; None if it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return None
        return float(times.user + times.system)

    async def kill(self) -> None:
        """End the process. It has closed its end of the connection, as the last of its doings, when this returns."""
        # An id may stand for another process once its own has ended, which closes the connection.
        if not self._reader.at_eof():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                while await self._reader.read(MAX_LINE_BYTES):
                    pass
        self._writer.close()


class CompileProcesses:
    """Forks processes for one vocabulary after the other, each from a template process that has loaded it."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """Run `command` as the template."""
        self._command = command
        self._turn = asyncio.Lock()
        # The vocabulary of the template; None: it has not loaded one yet.
        self._source: VocabularySource | None = None
        self._template: ChildProcess | None = None
        self._control: socket.socket | None = None

    async def take(self, source: VocabularySource) -> CompileProcess:
        """Return a new process that compiles for a vocabulary.

        Raises:
            UnavailableError: it does not start.
        """
        async with self._turn, self._ending_at_errors():
            await self._ensure_loaded(source)
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await self._fork()

    async def start(self) -> None:
        """Start the template, unless it runs: it imports for seconds what does not depend on the vocabulary.

        Raises:
            UnavailableError: it does not start.
        """
        async with self._turn, self._ending_at_errors():
            await self._ensure_started()

    async def warm(self, source: VocabularySource) -> None:
        """Let the template load a vocabulary, and start it if it does not run.

        Raises:
            UnavailableError: it does not start.
        """
        async with self._turn, self._ending_at_errors():
            await self._ensure_loaded(source)

    async def close(self) -> None:
        """End the template. The next `take`, `start` or `warm` starts another one."""
        async with self._turn:
            await self._end()

    @contextlib.asynccontextmanager
    async def _ending_at_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except (TimeoutError, OSError, ValueError) as error:
            await self._end()
            get_logger("grammars").exception("grammars.cannot_start")
            raise UnavailableError("the worker cannot compile grammars now", retry_after_ms=1000) from error

    async def _ensure_loaded(self, source: VocabularySource) -> None:
        if self._source not in (None, source):
            await self._end()
        template = await self._ensure_started()
        if self._source is None:
            try:
                await template.ask(asdict(source), START_TIMEOUT_S)
            except BaseException:
                await self._end()
                raise
            self._source = source

    async def _ensure_started(self) -> ChildProcess:
        if self._template is not None and not self._template.has_ended:
            return self._template
        await self._end()
        control, theirs = socket.socketpair()
        self._control = control
        with theirs:
            descriptor = theirs.fileno()
            self._template = await ChildProcess.start(self._command, str(descriptor), descriptors=(descriptor,))
        return self._template

    async def _fork(self) -> CompileProcess:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        try:
            return CompileProcess(int((await read_message(reader))["pid"]), reader, writer)
        except BaseException:
            # The process ends when it finds its connection closed.
            writer.close()
            raise

    async def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        template, self._template, self._control, self._source = self._template, None, None, None
        if template is not None:
            await template.kill()


def is_installed() -> bool:
    """Return whether XGrammar can be imported."""
    return importlib.util.find_spec(LIBRARY) is not None


def check_installed(grammar: Grammar) -> None:
    """Raise InvalidRequestError, which names the package, if XGrammar is missing."""
    if not is_installed():
        raise InvalidRequestError(
            f"'{grammar.param}' needs the package {LIBRARY}, which the server lacks; "
            f"its operator can run `pip install --no-deps {LIBRARY}`.",
            param=grammar.param,
        )
