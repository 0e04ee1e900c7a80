"""Compiled grammars, each compiled once in a thread of its own, and kept while there is room."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from services.worker.engine.grammars.matcher import Matcher

if TYPE_CHECKING:
    from collections.abc import Callable

    import xgrammar

    from common.grammars import Grammar
    from services.worker.engine.grammars.vocabulary_source import VocabularySource

CACHE_BYTES = 512 * 1024 * 1024
# Serving goes before compiling.
NICENESS = 10


class CompilesGrammars(Protocol):
    """What the library needs of `Compiler`."""

    pieces: list[bytes]

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compile a grammar; it was found good before."""


def make_compiler(source: VocabularySource) -> CompilesGrammars:
    """Return the compiler for a vocabulary."""
    from services.worker.engine.grammars.compiler import Compiler

    return Compiler(source)


class GrammarLibrary:
    """Belongs to no thread. What is compiled stays valid for whoever holds it, also after it was dropped from here."""

    def __init__(
        self, make: Callable[[VocabularySource], CompilesGrammars] = make_compiler, cache_bytes: int = CACHE_BYTES
    ) -> None:
        """Start without a vocabulary; `make` is called with the first grammar that is compiled for one."""
        self._make = make
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._source: VocabularySource | None = None
        self._compiler: CompilesGrammars | None = None
        # The one used last at the end.
        self._compiled: OrderedDict[Grammar, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars", initializer=_be_nice)

    @property
    def source(self) -> VocabularySource | None:
        """The vocabulary that grammars are compiled for, None before there is one."""
        return self._source

    def serve(self, source: VocabularySource) -> None:
        """Compile for this vocabulary from now on; what was compiled for another one is dropped."""
        with self._lock:
            if source != self._source:
                self._source, self._compiler = source, None
                self._compiled.clear()

    def has(self, grammar: Grammar) -> bool:
        """Whether it is there already."""
        with self._lock:
            found = self._compiled.get(grammar)
            return found is not None and found.done() and found.exception() is None

    def compiled(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        """Return the compiled grammar, when it is there; one that failed before is tried again."""
        with self._lock:
            assert self._source is not None, "grammars come after the model"
            found = self._compiled.get(grammar)
            if found is None or (found.done() and found.exception() is not None):
                found = self._compiled[grammar] = self._thread.submit(self._compile, grammar, self._source)
            self._compiled.move_to_end(grammar)
            self._drop_oldest()
            return found

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of an output; waits if the grammar is not compiled yet."""
        assert self._source is not None, "grammars come after the model"
        compiled = self.compiled(grammar).result()
        assert self._compiler is not None, "it has compiled the grammar"
        return Matcher(compiled, self._source.vocabulary_size, self._compiler.pieces)

    def close(self) -> None:
        """Compile nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar, source: VocabularySource) -> xgrammar.CompiledGrammar:
        # One thread only, so nobody else makes one meanwhile.
        compiler = self._compiler if source == self._source else None
        if compiler is None:
            compiler = self._make(source)
            with self._lock:
                if source == self._source:
                    self._compiler = compiler
        return compiler.compile(grammar)

    def _drop_oldest(self) -> None:
        """Keep what is compiled within its limit, but the newest in any case."""
        sizes = {
            grammar: future.result().memory_size_bytes
            for grammar, future in self._compiled.items()
            if future.done() and future.exception() is None
        }
        total = sum(sizes.values())
        for grammar in list(self._compiled)[:-1]:
            if total <= self._cache_bytes:
                return
            if grammar in sizes:
                total -= sizes[grammar]
                del self._compiled[grammar]


def _be_nice() -> None:
    """Lower the priority of the calling thread, and of those that it starts; on Linux each has its own."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
