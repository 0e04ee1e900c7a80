"""Trial of a compiled grammar, in a process of its own, so that a bad grammar delays no other row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from services.worker.engine.grammars.compiler import GrammarError
from services.worker.engine.grammars.matcher import Matcher

if TYPE_CHECKING:
    import xgrammar

# So many tokens are drawn at random, starting so many times.
STEPS = 48
STARTS = 3
# CPU time. A mask that takes longer would hold up every row of a pass; those of good grammars take 0.1 ms.
MAX_MASK_S = 0.05
MAX_COMPILED_BYTES = 64 * 1024 * 1024


def try_out(compiled: xgrammar.CompiledGrammar, vocabulary_size: int) -> None:
    """Follow random paths through a grammar.

    Raises:
        GrammarError: it is too large, has no output, or is too slow to follow.
    """
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        raise GrammarError("it is too large when compiled")
    random = np.random.default_rng(0)
    for _ in range(STARTS):
        matcher = Matcher(compiled, vocabulary_size)
        for step in range(STEPS):
            started = time.thread_time()
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            if allowed.size == 0:
                raise GrammarError("no output conforms to it" if step == 0 else "it leads to where nothing conforms")
            has_ended = not matcher.accept(int(random.choice(allowed))) or matcher.is_terminated
            if time.thread_time() - started > MAX_MASK_S:
                raise GrammarError("it is too ambiguous to follow")
            if has_ended:
                break
