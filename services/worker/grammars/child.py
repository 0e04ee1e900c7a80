"""The process in which grammars are compiled and tried: one JSON object per line in, an answer each out.

Run as `python -m services.worker.grammars.child PARENT_PID`. The first line names the vocabulary, each further one
holds a grammar. An answer is a line of JSON and as many bytes as that says: the compiled grammar. A grammar that takes
for ever, or all memory, or the process itself, harms nothing but this process, which ends when its input does.
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
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from common.grammars import Grammar, GrammarKind
from common.orphans import die_with_parent
from services.worker.engine.grammars.compiler import Compiler, GrammarError
from services.worker.engine.grammars.trial import try_out
from services.worker.engine.grammars.vocabulary_source import VocabularySource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What goes over the two pipes; both ends are this package's.
Message = dict[str, Any]
# Serving goes before compiling, and starting a process before compiling in others: users may be waiting for it.
START_NICENESS = 5
NICENESS = 10
# Beside what the process takes to start.
MAX_BYTES = 3 * 1024**3
# Of a compiled grammar on its way to the worker; that is two to four times its size there.
MAX_DATA_BYTES = 128 * 1024**2
_STDERR = 2
_WARNING = re.compile(r"Warning: (.*)")


def main() -> None:
    """Serve standard input until it ends."""
    # Its input ends with its parent, but a grammar that is being compiled would not notice.
    die_with_parent(int(sys.argv[1]))
    os.nice(START_NICENESS)
    # Libraries that print must not be able to answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers, make_compile)


def serve(questions: TextIO, answers: BinaryIO, make: Callable[[Message], Callable[[Grammar], bytes]]) -> None:
    """Load a vocabulary as the first line says, and answer each line: what came of it, and how long it took."""
    compile_: Callable[[Grammar], bytes] | None = None
    for line in questions:
        message: Message = json.loads(line)
        started = time.perf_counter()
        answer: Message = {}
        data = b""
        if compile_ is None:
            compile_ = make(message)
        else:
            try:
                data = compile_(Grammar(GrammarKind(message["kind"]), message["text"], ""))
            except GrammarError as error:
                answer["refusal"] = str(error)
            except MemoryError:
                answer["refusal"] = "it takes too much memory to compile"
        answer["elapsed_us"] = round((time.perf_counter() - started) * 1e6)
        answer["bytes"] = len(data)
        answers.write(json.dumps(answer).encode() + b"\n" + data)
        answers.flush()


def make_compile(message: Message) -> Callable[[Grammar], bytes]:
    """Load the vocabulary that the first line names; return what compiles for it, and raises GrammarError."""
    message["eos_token_ids"] = tuple(message["eos_token_ids"])
    source = VocabularySource(**message)
    compiler = Compiler(source)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    os.nice(NICENESS - os.nice(0))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_BYTES, used + MAX_BYTES))

    def compile_(grammar: Grammar) -> bytes:
        with warnings_refused():
            compiled = compiler.compile(grammar)
        try_out(compiled, source.vocabulary_size)
        data = compiled.serialize_json().encode()
        if len(data) > MAX_DATA_BYTES:
            raise GrammarError("it is too large when compiled")
        return data

    return compile_


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
