"""Compiled grammars by scope, kept while there is room."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from common.host import available_cores
from services.worker.engine.grammars.matcher import MaskFiller, Matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import xgrammar
    from numpy.typing import NDArray

    from common.grammars import Grammar
    from services.worker.engine.grammars.spellings import Spellings
    from services.worker.engine.grammars.vocabulary_source import VocabularySource

CACHE_BYTES = 512 * 1024 * 1024
# Serving goes before compiling.
NICENESS = 10
# A row whose grammar was dropped meanwhile has it compiled again, during a forward pass, if that took no longer,
QUICK_S = 0.25
# and if the rows of its tenant have made passes wait for no more than this, which a minute refills.
WAIT_S_PER_MINUTE = 1.0
# A pass waits so long for a grammar that is compiled again; on a busy machine a quick one takes a multiple of its time.
RECOMPILE_TIMEOUT_S = 60.0
# Dropped grammars whose compile time is remembered, about 100 bytes each.
MAX_DROPPED = 65_536
# Larger ones are loaded beside the others.
LARGE_BYTES = 1024 * 1024
# Threads that compute the masks of a pass at most.
MAX_FILL_THREADS = 8


class CompilesGrammars(Protocol):
    """Compiles and loads grammars, as `Compiler` does."""

    @property
    def spellings(self) -> Spellings:
        """Those of the vocabulary."""

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compile a grammar; it was found good before."""

    def load(self, data: bytes) -> xgrammar.CompiledGrammar:
        """Return a grammar that another process compiled."""


def fill_threads() -> int:
    """Return the number of threads for the masks of a pass: half of the cores, as others do the rest of the work."""
    return max(1, min(MAX_FILL_THREADS, available_cores() // 2))


def make_compiler(source: VocabularySource) -> CompilesGrammars:
    """Return the compiler for a vocabulary."""
    from services.worker.engine.grammars.compiler import Compiler

    return Compiler(source)


@dataclass(slots=True)
class _Entry:
    compiled: Future[xgrammar.CompiledGrammar]
    # What compiling it took.
    seconds: float

    @property
    def is_ready(self) -> bool:
        return self.compiled.done() and not self.compiled.cancelled() and self.compiled.exception() is None

    @property
    def size(self) -> int:
        return int(self.compiled.result().memory_size_bytes) if self.is_ready else 0


class GrammarLibrary:
    """Belongs to no thread. A compiled grammar that the library has dropped stays valid for rows that use it.

    Grammars of equal text and different scopes are different ones: nothing shows that another scope has compiled the
    same. A subject beyond its part of the memory loses its own oldest; beyond the whole, the subject that holds most.
    """

    def __init__(
        self,
        make: Callable[[VocabularySource], CompilesGrammars] = make_compiler,
        cache_bytes: int = CACHE_BYTES,
        subject_bytes: int = CACHE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without a vocabulary; `make` is called with the first grammar for one, `clock` counts seconds."""
        self._make = make
        self._cache_bytes = cache_bytes
        self._subject_bytes = subject_bytes
        self._lock = threading.Lock()
        self._source: VocabularySource | None = None
        self._compiler: Future[CompilesGrammars] | None = None
        # The one used last at the end.
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        # Compile seconds of dropped grammars.
        self._dropped: OrderedDict[bytes, float] = OrderedDict()
        # Seconds that each tenant has made passes wait and that are not refilled, and when that was so.
        self._waited: dict[str, tuple[float, float]] = {}
        self._clock = clock
        self.threads = fill_threads()
        self._filler: MaskFiller | None = None
        self._small = ThreadPoolExecutor(1, "grammars", initializer=_be_nice)
        self._large = ThreadPoolExecutor(1, "large-grammars", initializer=_be_nice)

    @property
    def source(self) -> VocabularySource | None:
        """The vocabulary that grammars are compiled for, None before there is one."""
        return self._source

    def serve(self, source: VocabularySource) -> None:
        """Keep grammars of this vocabulary from now on; those of another one are dropped."""
        with self._lock:
            if source != self._source:
                self._source, self._compiler = source, None
                self._entries.clear()
                self._dropped.clear()

    def warm(self, *, beside_requests: bool) -> Future[None]:
        """Make the compiler for the vocabulary that is served, which takes seconds.

        `beside_requests` gives way to them. A rank that serves nothing before does not: on a host where all cores are
        busy, a thread of low priority takes ten times as long.
        """
        source = self._source
        assert source is not None, "a vocabulary comes with the model"

        def make() -> None:
            # Read here, so that no row waits until they are sorted.
            _ = self._compiler_of(source).spellings

        if beside_requests:
            return self._large.submit(make)
        thread = ThreadPoolExecutor(1, "vocabulary")
        made = thread.submit(make)
        thread.shutdown(wait=False)
        return made

    def has(self, grammar: Grammar) -> bool:
        """Whether it is there already."""
        with self._lock:
            entry = self._entries.get(grammar)
            return entry is not None and entry.is_ready

    def load(self, source: VocabularySource, grammar: Grammar, data: bytes, seconds: float) -> Future[None]:
        """Take over a grammar that another process has compiled for `source` within `seconds`."""
        thread = self._large if len(data) > LARGE_BYTES else self._small

        def load() -> None:
            compiled: Future[xgrammar.CompiledGrammar] = Future()
            compiled.set_result(self._compiler_of(source).load(data))
            with self._lock:
                if source == self._source:
                    self._entries[grammar] = _Entry(compiled, seconds)
                    self._entries.move_to_end(grammar)
                    self._drop_oldest(grammar)

        return thread.submit(load)

    def begin(self, grammar: Grammar) -> None:
        """Compile a grammar that a row needs, unless it is here; see `matcher`."""
        with self._lock:
            source, entry = self._source, self._entries.get(grammar)
            assert source is not None, "grammars come after the model"
            if entry is not None and (entry.is_ready or not entry.compiled.done()):
                self._entries.move_to_end(grammar)
            elif self._may_compile(grammar):
                compiling = self._large.submit(lambda: self._compiler_of(source).compile(grammar))
                self._entries[grammar] = _Entry(compiling, 0.0)

    def matcher(self, grammar: Grammar) -> Matcher | None:
        """Return a matcher at the start of an output; None if its grammar is gone, and would take long to be had.

        Normally a grammar is here before its rows are, also after a restart. A grammar that was dropped is compiled
        again only if that is quick and its tenant has not made passes wait for others like it, so that no one can make
        them wait at will.
        """
        self.begin(grammar)
        with self._lock:
            source, entry = self._source, self._entries.get(grammar)
        assert source is not None, "grammars come after the model"
        if entry is None:
            return None
        try:
            compiled = entry.compiled.result(timeout=RECOMPILE_TIMEOUT_S)
        except TimeoutError:
            return None
        return Matcher(compiled, source.vocabulary_size, self._compiler_of(source).spellings)

    def fill(self, matchers: Sequence[Matcher], masks: NDArray[np.int32], lines: Sequence[int]) -> None:
        """Write which tokens may come next, see `MaskFiller`."""
        if self._filler is None:
            self._filler = MaskFiller(self.threads)
        self._filler.fill(matchers, masks, lines)

    def _may_compile(self, grammar: Grammar) -> bool:
        """Return whether a pass may wait for a grammar; charge its tenant if it was dropped before."""
        seconds = self._dropped.get(_digest(grammar))
        if seconds is None:
            return True
        if seconds > QUICK_S:
            return False
        tenant, now = grammar.scope.tenant, self._clock()
        used, at = self._waited.get(tenant, (0.0, now))
        used = max(0.0, used - (now - at) * WAIT_S_PER_MINUTE / 60) + seconds
        if used > WAIT_S_PER_MINUTE:
            return False
        self._waited[tenant] = used, now
        return True

    def close(self) -> None:
        """Compile nothing more."""
        for thread in (self._small, self._large):
            thread.shutdown(wait=False, cancel_futures=True)

    def _compiler_of(self, source: VocabularySource) -> CompilesGrammars:
        """Return the compiler for a vocabulary, which one thread makes while others wait."""
        with self._lock:
            if source != self._source:
                return self._make(source)
            made = self._compiler
            is_mine = made is None
            if made is None:
                made = self._compiler = Future()
        if is_mine:
            try:
                made.set_result(self._make(source))
            except BaseException as error:
                with self._lock:
                    self._compiler = None
                made.set_exception(error)
                raise
        return made.result()

    def _drop_oldest(self, newest: Grammar) -> None:
        """Keep what is compiled within its limits, but the newest in any case."""
        sizes: Counter[tuple[str, str]] = Counter()
        for grammar, entry in self._entries.items():
            sizes[_subject(grammar)] += entry.size
        mine = _subject(newest)
        while sizes[mine] > self._subject_bytes and self._drop_one(mine, newest, sizes):
            pass
        while sizes.total() > self._cache_bytes:
            tenants: Counter[str] = Counter()
            for (tenant, _), size in sizes.items():
                tenants[tenant] += size
            subjects = sorted(sizes, key=lambda subject: (tenants[subject[0]], sizes[subject]), reverse=True)
            if not any(self._drop_one(subject, newest, sizes) for subject in subjects):
                return

    def _drop_one(self, subject: tuple[str, str], newest: Grammar, sizes: Counter[tuple[str, str]]) -> bool:
        """Drop a subject's oldest grammar; return whether there was one."""
        for grammar, entry in self._entries.items():
            if grammar != newest and entry.size and _subject(grammar) == subject:
                sizes[subject] -= entry.size
                del self._entries[grammar]
                self._dropped[_digest(grammar)] = entry.seconds
                if len(self._dropped) > MAX_DROPPED:
                    self._dropped.popitem(last=False)
                return True
        return False


def _subject(grammar: Grammar) -> tuple[str, str]:
    return grammar.scope.tenant, grammar.scope.subject


def _digest(grammar: Grammar) -> bytes:
    scope = grammar.scope
    parts = (grammar.kind.value, grammar.text, scope.tenant, scope.subject, scope.salt)
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).digest()


def _be_nice() -> None:
    """Lower the priority of the calling thread, and of those that it starts; on Linux each has its own."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
