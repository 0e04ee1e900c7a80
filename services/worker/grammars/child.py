"""The process in which grammars are tried: one JSON object per line in, one out. It ends when its input does.

Run as `python -m services.worker.grammars.child PARENT_PID`. The first line names the vocabulary, each further one
holds a grammar. A grammar that takes for ever, or all memory, or the process itself, harms nothing but this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, TextIO

from common.grammars import Grammar, GrammarKind
from common.orphans import die_with_parent
from services.worker.engine.grammars.compiler import Compiler, GrammarError
from services.worker.engine.grammars.trial import try_out
from services.worker.engine.grammars.vocabulary_source import VocabularySource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What goes over the two pipes; both ends are this package's.
Message = dict[str, Any]
# Serving goes before trying.
NICENESS = 10
# Beside what the process takes to start.
MAX_BYTES = 3 * 1024**3
_STDERR = 2
_WARNING = re.compile(r"Warning: (.*)")


def main() -> None:
    """Serve standard input until it ends."""
    # Its input ends with its parent, but a grammar that is being compiled would not notice.
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    # Libraries that print must not be able to answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers, make_trial)


def serve(questions: TextIO, answers: TextIO, make: Callable[[Message], Callable[[Grammar], None]]) -> None:
    """Make a trial from the first line, and answer each line: what is wrong, if anything, and how long it took."""
    trial: Callable[[Grammar], None] | None = None
    for line in questions:
        message: Message = json.loads(line)
        started = time.perf_counter()
        answer: Message = {}
        if trial is None:
            trial = make(message)
        else:
            try:
                trial(Grammar(GrammarKind(message["kind"]), message["text"], ""))
            except GrammarError as error:
                answer["refusal"] = str(error)
            except MemoryError:
                answer["refusal"] = "it takes too much memory to compile"
        answer["elapsed_us"] = round((time.perf_counter() - started) * 1e6)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def make_trial(message: Message) -> Callable[[Grammar], None]:
    """Load the vocabulary that the first line names; return what raises GrammarError for a grammar that is no good."""
    message["eos_token_ids"] = tuple(message["eos_token_ids"])
    source = VocabularySource(**message)
    compiler = Compiler(source)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_BYTES, used + MAX_BYTES))

    def trial(grammar: Grammar) -> None:
        with warnings_refused():
            compiled = compiler.compile(grammar)
        try_out(compiled, source.vocabulary_size)

    return trial


@contextlib.contextmanager
def warnings_refused() -> Iterator[None]:
    """Take a warning for a refusal: the library tells what of a grammar it ignores, but only on standard error.

    Raises:
        GrammarError: there was one.
    """
    with tempfile.TemporaryFile() as written:
        kept = os.dup(_STDERR)
        os.dup2(written.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)
        written.seek(0)
        warning = _WARNING.search(written.read().decode(errors="replace"))
    if warning is not None:
        raise GrammarError(warning.group(1)[:300])


if __name__ == "__main__":
    main()
