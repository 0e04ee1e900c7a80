"""A child process that compiles grammars. It is killed when a grammar takes too long or is not wanted any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from common.errors import UnavailableError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.grammars import Grammar
    from services.worker.engine.grammars.vocabulary_source import VocabularySource

# Importing and loading a vocabulary takes seconds on a slow machine.
START_TIMEOUT_S = 120.0
MAX_HEADER_BYTES = 1 << 16
COMMAND = (sys.executable, "-m", "services.worker.grammars.child")

# One line of JSON, as `child.py` writes and reads it.
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a grammar: it compiled, as `data`, or `refusal` says what is wrong with it."""

    refusal: str | None
    elapsed_us: int = 0
    # As `Compiler.load` reads it.
    data: bytes = b""
    # Whether the same would come of it again; what took too long may have been slowed by other work.
    is_final: bool = True


class CompileProcess:
    """Compiles one grammar at a time for one vocabulary."""

    def __init__(self, process: asyncio.subprocess.Process, source: VocabularySource) -> None:
        """Use a process that `start` has started."""
        self.source = source
        self._process = process

    @classmethod
    async def start(cls, source: VocabularySource, command: Sequence[str] = COMMAND) -> CompileProcess:
        """Start a process and have it load a vocabulary.

        Raises:
            UnavailableError: it does not start.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_HEADER_BYTES,
            )
        except OSError as error:
            raise _cannot_start() from error
        made = cls(process, source)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await made._exchange(asdict(source))
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            await made.kill()
            get_logger("grammars").exception("grammars.cannot_start")
            raise _cannot_start() from error
        except BaseException:
            await made.kill()
            raise
        return made

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can take a grammar."""
        return self._process.returncode is None

    async def compile(self, grammar: Grammar) -> Verdict:
        """Compile a grammar and try it out. If the caller is cancelled, the process is killed."""
        try:
            return await self._exchange({"kind": grammar.kind.value, "text": grammar.text})
        except (OSError, ValueError, asyncio.IncompleteReadError):
            await self.kill()
            get_logger("grammars").warning("grammars.process_died", kind=grammar.kind.value, bytes=len(grammar.text))
            return Verdict("it takes too much memory to compile")
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """End the process; it is gone when this returns."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        # The kernel ends it without delay; a second cancellation must not leave it unreaped.
        await asyncio.shield(self._process.wait())

    async def _exchange(self, question: Message) -> Verdict:
        """Send one line; read one, and as many bytes as it announces.

        Raises:
            OSError: the process is gone.
            ValueError: it answered something else than this package would.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(question).encode() + b"\n")
        await stdin.drain()
        line = await stdout.readline()
        if not line:
            raise ConnectionError("the process that compiles grammars has ended")
        answer: Message = json.loads(line)
        data = await stdout.readexactly(int(answer["bytes"]))
        return Verdict(answer.get("refusal"), int(answer["elapsed_us"]), data)


def _cannot_start() -> UnavailableError:
    return UnavailableError("the worker cannot compile grammars now", retry_after_ms=1000)
