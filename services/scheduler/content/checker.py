"""Queries the process that runs the detectors, and ends it if it does not answer in time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.child_process import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.child_process import JsonMessage
    from common.types import TokenIds

# Loading a model's vocabulary takes seconds on a slow machine.
START_TIMEOUT_S = 120.0
# A check that takes longer is aborted and counts as a rejection.
DEADLINE_S = 5.0
COMMAND = (sys.executable, "-m", "services.scheduler.content.child")


@dataclass(frozen=True, slots=True)
class CheckAnswer:
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

    def __init__(
        self, configuration: JsonMessage, deadline_s: float = DEADLINE_S, command: Sequence[str] = COMMAND
    ) -> None:
        """Run `command`, whose first message is `configuration`; each prompt may take `deadline_s`."""
        self._configuration = configuration
        self._deadline_s = deadline_s
        self._command = command
        self._process: ChildProcess | None = None

    async def examine(self, token_ids: TokenIds) -> CheckAnswer:
        """Return the verdict on a prompt, or the reason why there is none."""
        return await self._ask({"ids": token_ids.tolist()})

    async def look(self) -> CheckAnswer:
        """Let the detectors check their rules for changes."""
        return await self._ask({})

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _ask(self, question: JsonMessage) -> CheckAnswer:
        try:
            if self._process is None:
                self._process = await ChildProcess.start(self._command)
                started = _answer(await self._process.ask(self._configuration, START_TIMEOUT_S))
                if started.failure is not None:
                    await self.close()
                    return started
            return _answer(await self._process.ask(question, self._deadline_s))
        except TimeoutError:
            failure = f"no answer within {self._deadline_s:g} s"
        except (OSError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        await self.close()
        return CheckAnswer(failure=failure)


def _answer(message: JsonMessage) -> CheckAnswer:
    allowed = message.get("allowed")
    if allowed is not None and (not isinstance(allowed, int) or allowed < 0):
        raise ValueError(f"no number of tokens: {allowed!r}")
    return CheckAnswer(
        allowed_tokens=allowed,
        rule=message.get("rule"),
        rules=message.get("rules"),
        complaint=message.get("complaint"),
        failure=message.get("failure"),
    )
