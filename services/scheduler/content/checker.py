"""Queries the process that runs the detectors, and ends it if it does not answer in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import TokenIds

# Loading a model's vocabulary takes seconds on a slow machine.
START_TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 1 << 16
COMMAND = (sys.executable, "-m", "services.scheduler.content.child")

# One line of JSON, as read and written by `child.py`.
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the child process.

    `allowed_tokens` is None if there is no verdict, for the reason in `failure`. `rules` identifies the rules in
    effect; `complaint` is the reason why newer ones are not in effect.
    """

    allowed_tokens: int | None = None
    rule: str | None = None
    rules: str | None = None
    complaint: str | None = None
    failure: str | None = None


class ContentChecker:
    """Owns the child process. One query at a time; after a failure the next query starts a new process."""

    def __init__(self, configuration: Message, deadline_s: float, command: Sequence[str] = COMMAND) -> None:
        """Run `command`, whose first line of input is `configuration`; each prompt may take `deadline_s`."""
        self._configuration = configuration
        self._deadline_s = deadline_s
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._log = get_logger("content")

    async def examine(self, token_ids: TokenIds) -> Answer:
        """Return the verdict on a prompt, or the reason why there is none."""
        return await self._ask({"ids": token_ids.tolist()})

    async def look(self) -> Answer:
        """Let the detectors check their rules for changes."""
        return await self._ask({})

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, question: Message) -> Answer:
        try:
            if self._process is None:
                started = await self._start()
                if started.failure is not None:
                    await self.close()
                    return started
            return await self._exchange(question, self._deadline_s)
        except TimeoutError:
            failure = f"no answer within {self._deadline_s:g} s"
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            failure = f"{type(error).__name__}: {error}"
        await self.close()
        return Answer(failure=failure)

    async def _start(self) -> Answer:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_ANSWER_BYTES,
        )
        return await self._exchange(self._configuration, START_TIMEOUT_S)

    async def _exchange(self, question: Message, timeout_s: float) -> Answer:
        """Send one line and read one.

        Raises:
            TimeoutError: the answer takes too long.
            OSError: the process has ended.
            ValueError: the answer is malformed.
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
            raise ConnectionError("the process that examines has ended")
        return _answer(json.loads(line))


def _answer(message: Message) -> Answer:
    allowed = message.get("allowed")
    if allowed is not None and (not isinstance(allowed, int) or allowed < 0):
        raise ValueError(f"no number of tokens: {allowed!r}")
    return Answer(
        allowed_tokens=allowed,
        rule=message.get("rule"),
        rules=message.get("rules"),
        complaint=message.get("complaint"),
        failure=message.get("failure"),
    )
