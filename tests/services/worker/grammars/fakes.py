"""Compilation by a fake: grammars say themselves how long they take, in the seconds of a clock that only tests move."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import UnavailableError
from common.grammars import Grammar, GrammarKind, GrammarScope
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.engine.grammars.spellings import Spellings
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.grammars.process import CompileResult

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = VocabularySource("none", "fake", 16, (2,))
SIZE = 1000
ANN = GrammarScope("acme", "user/ann")
BOB = GrammarScope("acme", "user/bob")
RIVAL = GrammarScope("rival", "key/r")


def grammar(text: str, scope: GrammarScope = ANN) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, "regex", scope)


@dataclass
class Compiled:
    memory_size_bytes: int = SIZE


class FakeCompiler:
    """Counts what is compiled in the worker itself."""

    def __init__(self) -> None:
        self.spellings = Spellings([])
        self.compiled: list[Grammar] = []

    def compile(self, grammar: Grammar) -> Any:
        self.compiled.append(grammar)
        return Compiled()

    def load(self, data: bytes) -> Any:
        return Compiled(int(data))


def library(**limits: Any) -> GrammarLibrary:
    compiler = FakeCompiler()
    made = GrammarLibrary(lambda _source: compiler, **limits)
    made.serve(SOURCE)
    return made


@dataclass
class Work:
    """What all processes together have done and are doing."""

    warmed: list[VocabularySource] = field(default_factory=list)
    # Calls of `start` and of `close`.
    begun: int = 0
    closed: int = 0
    cannot_start: bool = False
    started: list[Grammar] = field(default_factory=list)
    stopped: list[Grammar] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    # A grammar that is not here takes no time.
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    # What each process says it has used; None: it has ended.
    cpu_seconds: float | None = None

    def texts(self) -> list[str]:
        return [grammar.text for grammar in self.started]

    def hold(self, *texts: str) -> None:
        """Let these take until they are released."""
        self.gates.update({text: asyncio.Event() for text in texts})

    async def start(self) -> None:
        self.begun += 1
        if self.cannot_start:
            raise UnavailableError("no process starts")

    async def warm(self, source: VocabularySource) -> None:
        self.warmed.append(source)
        if self.cannot_start:
            raise UnavailableError("no process starts")

    async def take(self, source: VocabularySource) -> FakeProcess:
        await asyncio.sleep(0)
        return FakeProcess(self)

    async def close(self) -> None:
        self.closed += 1


class FakeProcess:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._number = next(work.numbers)
        work.alive.add(self._number)

    async def compile(self, grammar: Grammar) -> CompileResult:
        assert self._number in self._work.alive
        self._work.started.append(grammar)
        try:
            gate = self._work.gates.get(grammar.text)
            if gate is not None:
                await gate.wait()
        except BaseException:
            self._work.stopped.append(grammar)
            raise
        if grammar.text == "bad":
            return CompileResult("it is bad", 1000)
        return CompileResult(None, 1000, b"%d" % SIZE)

    def cpu_seconds(self) -> float | None:
        return self._work.cpu_seconds

    async def kill(self) -> None:
        self._work.alive.discard(self._number)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


async def eventually(condition: Callable[[], object], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
