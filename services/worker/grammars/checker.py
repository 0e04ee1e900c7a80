"""Asks the process in which grammars are tried, and ends it when it does not answer in time."""

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
MAX_ANSWER_BYTES = 1 << 16
COMMAND = (sys.executable, "-m", "services.worker.grammars.child")

# One line of JSON, as `child.py` writes and reads it.
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refusal` says what is wrong with a grammar, None: nothing."""

    refusal: str | None
    elapsed_us: int = 0


class GrammarChecker:
    """Owns the process, which starts with the first grammar, and again after a failure. One grammar at a time."""

    def __init__(self, deadline_s: float, command: Sequence[str] = COMMAND) -> None:
        """Run `command`, and give it `deadline_s` per grammar."""
        self._deadline_s = deadline_s
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._source: VocabularySource | None = None
        self._turn = asyncio.Lock()
        self._log = get_logger("grammars")

    async def check(self, source: VocabularySource, grammar: Grammar) -> Verdict:
        """Try a grammar out for a vocabulary.

        Raises:
            UnavailableError: the process cannot be started.
        """
        async with self._turn:
            await self._ensure_started(source)
            try:
                answer = await self._exchange({"kind": grammar.kind.value, "text": grammar.text}, self._deadline_s)
            except TimeoutError:
                await self.close()
                return Verdict(f"it takes longer than {self._deadline_s:g} s to compile")
            except (OSError, ValueError):
                self._log.warning("grammars.process_died", kind=grammar.kind.value, bytes=len(grammar.text))
                await self.close()
                return Verdict("it takes too much memory to compile")
            except BaseException:
                # Cancelled in the middle: the next answer would be this one's.
                await self.close()
                raise
            return Verdict(answer.get("refusal"), int(answer["elapsed_us"]))

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ensure_started(self, source: VocabularySource) -> None:
        if self._process is not None and source == self._source and self._process.returncode is None:
            return
        await self.close()
        self._source = source
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_ANSWER_BYTES,
            )
            await self._exchange(asdict(source), START_TIMEOUT_S)
        except (TimeoutError, OSError, ValueError) as error:
            await self.close()
            self._log.exception("grammars.cannot_start")
            raise UnavailableError("the worker cannot compile grammars now", retry_after_ms=1000) from error

    async def _exchange(self, question: Message, timeout_s: float) -> Message:
        """Send one line and read one.

        Raises:
            TimeoutError: it takes too long.
            OSError: the process is gone.
            ValueError: it answered something else than this package would.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(timeout_s):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            raise ConnectionError("the process that tries grammars has ended")
        answer: Message = json.loads(line)
        return answer
