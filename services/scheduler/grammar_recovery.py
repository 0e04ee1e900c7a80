"""Grammars of open requests, which workers compile again after a restart before the requests continue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import PandoError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from common.grammars import Grammar
    from services.scheduler.core.core import SchedulerCore

RETRY_S = 1.0
# A grammar that was compiled before is refused only if it takes too much time or memory beside other work.
MAX_REFUSALS = 5


class GrammarRecovery:
    """Holds sequences back until the workers have their grammars; all others continue meanwhile.

    A row that started without its grammar would make every row of its passes wait while that is compiled.
    """

    def __init__(self, prepare: Callable[[Grammar], Awaitable[None]], wake: Callable[[], None]) -> None:
        """`prepare` has the workers compile a grammar; `wake` is called when sequences may start or have ended."""
        self._prepare = prepare
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, core: SchedulerCore) -> None:
        """Hold back all sequences with grammars, each until its grammar is compiled; call this once workers are ready.

        A grammar that is refused again and again ends its sequences with the error.
        """
        self.stop()
        for grammar in core.hold_grammars():
            task = asyncio.create_task(self._recover(core, grammar))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Stop waiting for workers that are lost; sequences stay held back until the next `start`."""
        for task in self._tasks:
            task.cancel()

    async def _recover(self, core: SchedulerCore, grammar: Grammar) -> None:
        refusals = 0
        while True:
            try:
                await self._prepare(grammar)
            except PandoError as error:
                refusals += not error.to_failure().retryable
                get_logger("grammars").warning("grammar.not_recovered", reason=str(error), refusals=refusals)
                if refusals < MAX_REFUSALS:
                    await asyncio.sleep(RETRY_S)
                    continue
                core.release_grammar(grammar, error)
            else:
                core.release_grammar(grammar)
            self._wake()
            return
