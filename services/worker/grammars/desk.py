"""Compiles grammars ahead of the rows that need them, fairly between tenants and their subjects."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from common.errors import InvalidRequestError, PandoError, QueueFullError, UnavailableError
from common.logs import get_logger
from services.worker import metrics
from services.worker.grammars.process import CompileResult
from services.worker.grammars.turns import CompileBudget, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from common.grammars import Grammar, GrammarScope
    from services.worker.engine.grammars.library import GrammarLibrary
    from services.worker.engine.grammars.vocabulary_source import VocabularySource

# Waiting compilations of all subjects together; beyond, the subject with most loses its newest.
MAX_WAITING = 1024
# Refusals that are remembered, so that a bad grammar is not tried again and again.
MAX_REFUSALS = 1024


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of compilations: of one grammar, then of the grammars of one subject."""

    # After this time, a compilation is aborted and the request refused.
    timeout_s: float = 30.0
    # After this time, a compilation yields to other subjects' grammars: one such long compilation continues in
    # parallel, further ones restart when it has ended.
    slice_s: float = 1.0
    # Grammars that may be waiting or in compilation.
    open_per_subject: int = 16
    seconds_per_minute: float = 30.0


class Compiles(Protocol):
    """A process that compiles a grammar, as `CompileProcess` does."""

    async def compile(self, grammar: Grammar) -> CompileResult:
        """Compile a grammar."""

    def cpu_seconds(self) -> float | None:
        """Return the processor time that it has used; None if it has ended."""

    async def kill(self) -> None:
        """End the process, whatever it does."""


class StartsProcesses(Protocol):
    """A source of such processes, as `CompileProcesses` is."""

    async def take(self, source: VocabularySource) -> Compiles:
        """Return a new process that compiles for a vocabulary; raises UnavailableError."""

    async def start(self) -> None:
        """Prepare for any vocabulary; raises UnavailableError."""

    async def warm(self, source: VocabularySource) -> None:
        """Load a vocabulary ahead of the first process for it; raises UnavailableError."""

    async def close(self) -> None:
        """End the template."""


@dataclass(slots=True, eq=False)
class _Job:
    source: VocabularySource
    grammar: Grammar
    answer: asyncio.Future[CompileResult]
    # Calls that wait for the answer.
    callers: int = 0
    # Whether it has used up its slice.
    is_long: bool = False
    # While it is compiled.
    task: asyncio.Task[None] | None = field(default=None)


class GrammarDesk:
    """Two compilations run at a time, each in a process of its own.

    Every grammar starts in the first place. If it takes longer than a slice, it moves on to the second place with its
    process, where it may take until its timeout; if that place is taken, it is stopped, and waits for its turn there to
    start again. Until it has ended, its subject gets no further slice. So a grammar of another subject waits for at
    most one slice of each that comes before it, whatever these compile.
    """

    def __init__(
        self,
        library: GrammarLibrary,
        processes: StartsProcesses,
        limits: GrammarLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`library` receives the grammars that `processes` compile."""
        self._library = library
        self._processes = processes
        self._limits = limits
        self._clock = clock
        self._budget = CompileBudget(limits.seconds_per_minute, clock)
        self._open: dict[Grammar, _Job] = {}
        self._new: Turns[_Job] = Turns()
        self._long: Turns[_Job] = Turns()
        self._first: _Job | None = None
        self._second: _Job | None = None
        self._is_closed = False
        self._refusals: OrderedDict[tuple[VocabularySource, Grammar], str] = OrderedDict()

    @property
    def has_vocabulary(self) -> bool:
        """Whether a model is loaded that follows grammars."""
        return self._library.source is not None

    async def begin(self) -> None:
        """Start the process from which others are forked, while the model is loaded that will have the vocabulary.

        A failure was logged, and is repeated by `warm` or the first grammar.
        """
        if not self._is_closed:
            with contextlib.suppress(UnavailableError):
                await self._processes.start()

    async def rest(self) -> None:
        """End that process, as the model that was loaded follows no grammars."""
        await self._processes.close()

    async def warm(self, *, compiles: bool, beside_requests: bool = False) -> None:
        """Load the vocabulary here and, on a rank that `compiles`, in the process from which others are forked.

        `beside_requests`: the rank serves already.
        The first grammar then waits for neither. A failure is logged, and repeated by the first grammar.
        """
        source = self._library.source
        if source is None:
            return
        try:
            loading = [asyncio.wrap_future(self._library.warm(beside_requests=beside_requests))]
            await asyncio.gather(*loading, *([self._processes.warm(source)] if compiles else []))
        except Exception as error:  # noqa: BLE001  (requests without grammars can be served)
            get_logger("grammars").warning("grammars.not_warm", reason=str(error))

    async def prepare(self, grammar: Grammar) -> int:
        """Compile a grammar for its scope; return the microseconds that it took, 0 if the library has it already.

        Calls for the same grammar and scope wait together. When all of them are cancelled, compiling stops.

        Raises:
            InvalidRequestError: the grammar is wrong, too large, or takes too long.
            QueueFullError: its subject has too many open compilations, or has used up its compile seconds.
            UnavailableError: no process can be started.
        """
        source = self._library.source
        # An engine without a model ignores grammars, as it does all parameters.
        if source is None or self._library.has(grammar):
            return 0
        refusal = self._refusals.get((source, grammar))
        if refusal is not None:
            raise _refused(grammar, refusal)
        job = self._open.get(grammar) or self._enter(source, grammar)
        job.callers += 1
        try:
            result = await asyncio.shield(job.answer)
        finally:
            job.callers -= 1
            if not job.callers and not job.answer.done():
                self._abandon(job)
        if result.refusal is not None:
            raise _refused(grammar, result.refusal)
        return result.elapsed_us

    async def close(self) -> None:
        """Abandon open jobs and end the processes."""
        self._is_closed = True
        tasks = [job.task for job in self._open.values() if job.task is not None]
        for job in list(self._open.values()):
            self._abandon(job)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._processes.close()
        self._library.close()

    def _enter(self, source: VocabularySource, grammar: Grammar) -> _Job:
        """Let a grammar wait for its turn.

        Raises:
            QueueFullError: its subject may not.
        """
        scope = grammar.scope
        self._check_budget(scope)
        mine = sum(_is_same(job.grammar.scope, scope) for job in self._open.values())
        if mine >= self._limits.open_per_subject:
            metrics.GRAMMARS_TOTAL.labels("limited").inc()
            raise QueueFullError(
                f"{mine} grammars of this user are being compiled or wait to be, which is the limit. Try again later.",
                param=grammar.param,
                retry_after_ms=1000,
            )
        job = _Job(source, grammar, asyncio.get_running_loop().create_future())
        self._open[grammar] = job
        self._new.add(scope, job)
        if len(self._new) + len(self._long) > MAX_WAITING:
            self._push_out()
        self._fill()
        return job

    def _push_out(self) -> None:
        last = (self._new if len(self._new) >= len(self._long) else self._long).last_of_longest()
        self._fail(last, QueueFullError("too many grammars wait to be compiled", retry_after_ms=1000))

    def _check_budget(self, scope: GrammarScope) -> None:
        wait_s = self._budget.wait_s(scope)
        if wait_s > 0:
            metrics.GRAMMARS_TOTAL.labels("limited").inc()
            raise QueueFullError(
                f"This user's grammars have taken more than the {self._limits.seconds_per_minute:g} s a minute that "
                f"are for compiling them. Try again in {math.ceil(wait_s)} s, or use simpler grammars.",
                retry_after_ms=max(1000, round(wait_s * 1000)),
            )

    def _fill(self) -> None:
        """Start the next job in each free place."""
        if self._is_closed:
            return
        have_long = {
            (job.grammar.scope.tenant, job.grammar.scope.subject) for job in self._open.values() if job.is_long
        }
        if self._first is None and (job := self._next(self._new, have_long)) is not None:
            self._first = job
            self._start(job)
        if self._second is None and (job := self._next(self._long)) is not None:
            self._second = job
            self._start(job)

    def _start(self, job: _Job) -> None:
        job.task = task = asyncio.create_task(self._run(job))

        def leave_unless_left(_: asyncio.Task[None]) -> None:
            if job.task is task:
                self._leave(job)

        # A task that is cancelled before its first step never runs, not even its `finally`.
        task.add_done_callback(leave_unless_left)

    def _next(self, turns: Turns[_Job], passed_over: Set[tuple[str, str]] = frozenset()) -> _Job | None:
        while (job := turns.take(passed_over)) is not None:
            try:
                self._check_budget(job.grammar.scope)
            except QueueFullError as error:
                self._fail(job, error)
            else:
                return job
        return None

    async def _run(self, job: _Job) -> None:
        try:
            result = await self._compile(job)
            if result is not None and result.refusal is None:
                loading = self._library.load(job.source, job.grammar, result.data, result.elapsed_us / 1e6)
                await asyncio.wrap_future(loading)
        except PandoError as error:
            self._fail(job, error)
        except Exception as error:
            self._fail(job, error)
            raise
        else:
            if result is None:
                self._long.add(job.grammar.scope, job)
            else:
                self._answer(job, result)
        finally:
            # Here, as a job that waits again may be restarted before this task's callback runs.
            self._leave(job)

    async def _compile(self, job: _Job) -> CompileResult | None:
        """Compile a job's grammar; return None if it has to wait for the second place."""
        process = await self._processes.take(job.source)
        compiling = asyncio.create_task(process.compile(job.grammar))
        started = self._clock()
        try:
            is_first = job is self._first
            if is_first:
                await asyncio.wait({compiling}, timeout=self._limits.slice_s)
                if not compiling.done():
                    job.is_long = True
                    if not self._move_on(job):
                        return None
            left = self._limits.timeout_s - (self._limits.slice_s if is_first else 0.0)
            await asyncio.wait({compiling}, timeout=max(0.0, left))
            if not compiling.done():
                return CompileResult(f"it takes longer than {self._limits.timeout_s:g} s to compile", is_final=False)
            return compiling.result()
        finally:
            # On a busy machine other work takes most of the time that passes.
            passed, used = self._clock() - started, process.cpu_seconds()
            self._budget.charge(job.grammar.scope, passed if used is None else min(used, passed))
            if not compiling.done():
                compiling.cancel()
                await asyncio.wait({compiling})
            await process.kill()

    def _move_on(self, job: _Job) -> bool:
        """Give the first place to the next grammar, if the second is free for this one."""
        if self._second is not None or len(self._long):
            return False
        self._first, self._second = None, job
        self._fill()
        return True

    def _leave(self, job: _Job) -> None:
        job.task = None
        if self._first is job:
            self._first = None
        if self._second is job:
            self._second = None
        self._fill()

    def _answer(self, job: _Job, result: CompileResult) -> None:
        metrics.GRAMMARS_TOTAL.labels("compiled" if result.refusal is None else "refused").inc()
        metrics.GRAMMAR_COMPILE_SECONDS.observe(result.elapsed_us / 1e6)
        if result.refusal is not None and result.is_final:
            self._refusals[job.source, job.grammar] = result.refusal
            while len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)
        self._open.pop(job.grammar, None)
        if not job.answer.done():
            job.answer.set_result(result)

    def _fail(self, job: _Job, error: Exception) -> None:
        self._open.pop(job.grammar, None)
        if not job.answer.done():
            job.answer.set_exception(error)
            job.answer.exception()  # the last caller may have gone

    def _abandon(self, job: _Job) -> None:
        """Stop a job that no call waits for any more."""
        metrics.GRAMMARS_TOTAL.labels("stopped").inc()
        self._open.pop(job.grammar, None)
        job.answer.cancel()
        self._new.remove(job.grammar.scope, job)
        self._long.remove(job.grammar.scope, job)
        if job.task is not None:
            job.task.cancel()
        self._fill()


def _is_same(lhs: GrammarScope, rhs: GrammarScope) -> bool:
    """Whether two scopes are of one subject."""
    return lhs.tenant == rhs.tenant and lhs.subject == rhs.subject


def _refused(grammar: Grammar, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{grammar.param}' cannot be followed: {reason}.", param=grammar.param)
