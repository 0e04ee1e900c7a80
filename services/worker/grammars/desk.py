"""Makes grammars ready before rows come that need them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError, UnavailableError
from services.worker import metrics

if TYPE_CHECKING:
    from common.grammars import Grammar
    from services.worker.engine.grammars.library import GrammarLibrary
    from services.worker.engine.grammars.vocabulary_source import VocabularySource
    from services.worker.grammars.checker import GrammarChecker, Verdict

# Grammars that are tried or wait for it; beyond that, clients are told to come back.
MAX_OPEN = 64
# Refusals that are remembered, so that a bad grammar is not tried again and again.
MAX_REFUSALS = 1024


class GrammarDesk:
    """First a grammar is tried in a process of its own, then it is compiled here, in a thread.

    It is compiled twice, because what is compiled can become a hundred times larger on its way between processes.
    """

    def __init__(self, library: GrammarLibrary, checker: GrammarChecker) -> None:
        """Put what `checker` finds good into `library`."""
        self._library = library
        self._checker = checker
        self._open: dict[Grammar, asyncio.Task[Verdict]] = {}
        self._refusals: OrderedDict[tuple[VocabularySource, Grammar], str] = OrderedDict()

    async def prepare(self, grammar: Grammar) -> int:
        """Have a grammar compiled; return the microseconds that took, 0 if it was there already.

        It goes on if the caller is cancelled, and equal grammars wait for the same.

        Raises:
            InvalidRequestError: the grammar is wrong, too large, or takes too long.
            UnavailableError: too many grammars wait.
        """
        source = self._library.source
        # An engine without a model heeds no grammar, like no other parameter.
        if source is None or self._library.has(grammar):
            return 0
        refusal = self._refusals.get((source, grammar))
        if refusal is not None:
            raise _refused(grammar, refusal)
        task = self._open.get(grammar)
        if task is None:
            if len(self._open) >= MAX_OPEN:
                raise UnavailableError("too many grammars are waiting to be compiled", retry_after_ms=1000)
            task = self._open[grammar] = asyncio.create_task(self._prepare(source, grammar))
            task.add_done_callback(lambda done: self._forget(grammar, done))
        verdict = await asyncio.shield(task)
        if verdict.refusal is not None:
            raise _refused(grammar, verdict.refusal)
        return verdict.elapsed_us

    async def close(self) -> None:
        """Give up what is open and end the process."""
        for task in list(self._open.values()):
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        await self._checker.close()
        self._library.close()

    async def _prepare(self, source: VocabularySource, grammar: Grammar) -> Verdict:
        verdict = await self._checker.check(source, grammar)
        metrics.GRAMMARS_TOTAL.labels("compiled" if verdict.refusal is None else "refused").inc()
        metrics.GRAMMAR_COMPILE_SECONDS.observe(verdict.elapsed_us / 1e6)
        if verdict.refusal is None:
            await asyncio.wrap_future(self._library.compiled(grammar))
            return verdict
        self._refusals[source, grammar] = verdict.refusal
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)
        return verdict

    def _forget(self, grammar: Grammar, done: asyncio.Task[Verdict]) -> None:
        del self._open[grammar]
        if not done.cancelled():
            done.exception()  # nobody may be left to wait for it


def _refused(grammar: Grammar, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{grammar.param}' cannot be followed: {reason}.", param=grammar.param)
