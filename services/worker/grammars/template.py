"""The process that forks one process for each compilation, as loading what a compilation needs takes seconds.

Run as `python -m services.worker.grammars.template PARENT_PID SOCKET`. The first line of input names the vocabulary;
one line comes out when that is loaded. Each file descriptor that then comes over the socket is the end of a connection
for a forked process. That writes its id in a line of JSON, reads a grammar from a line of JSON, and writes a line of
JSON and as many bytes as that says: the compiled grammar. A grammar that takes for ever, or all memory, or the process
itself, harms nothing but its own process. The template ends when the socket is closed, and its processes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import TYPE_CHECKING

from common.child_process import begin_child, die_with_parent
from common.grammars import Grammar, GrammarKind
from services.worker.engine.grammars.compiler import Compiler, GrammarError, try_out
from services.worker.engine.grammars.vocabulary_source import VocabularySource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.child_process import JsonMessage

# Serving goes before compiling.
NICENESS = 10
# Beside what the process takes to start.
MAX_BYTES = 3 * 1024**3
# Of a compiled grammar on its way to the worker; that is two to four times its size there.
MAX_DATA_BYTES = 128 * 1024**2
_STDERR = 2
_WARNING = re.compile(r"Warning: (.*)")


def main() -> None:
    """Load a vocabulary, and fork until the socket is closed."""
    answers = begin_child()
    # Now, as the vocabulary may only be known when a model's configuration has been read.
    import xgrammar  # noqa: F401

    compile_ = make_compile(json.loads(sys.stdin.readline()))
    os.nice(NICENESS)
    # The kernel reaps what was forked.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    answers.write("{}\n")
    answers.close()
    with socket.socket(fileno=int(sys.argv[2])) as control:
        fork_for_each(control, compile_)


def fork_for_each(control: socket.socket, compile_: Callable[[Grammar], bytes]) -> None:
    """Fork a process for each descriptor that comes."""
    template = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                pid = os.fork()
            except OSError:
                traceback.print_exc()
                continue
            if pid == 0:
                _run(template, control, connection, compile_)


def _run(
    template: int, control: socket.socket, connection: socket.socket, compile_: Callable[[Grammar], bytes]
) -> None:
    """Serve one connection in a forked process, and end it."""
    try:
        die_with_parent(template)
        control.close()
        serve(connection, compile_)
    except BaseException:  # noqa: BLE001  (nothing of the template may run in this process)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve(connection: socket.socket, compile_: Callable[[Grammar], bytes]) -> None:
    """Answer one grammar: what is wrong with it, or its compiled form, and how long that took."""
    with connection.makefile("rwb") as stream:
        stream.write(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        stream.flush()
        line = stream.readline()
        if not line:
            return
        message: JsonMessage = json.loads(line)
        started = time.perf_counter()
        answer: JsonMessage = {}
        data = b""
        try:
            data = compile_(Grammar(GrammarKind(message["kind"]), message["text"], ""))
        except GrammarError as error:
            answer["refusal"] = str(error)
        except MemoryError:
            answer["refusal"] = "it takes too much memory to compile"
        answer["elapsed_us"] = round((time.perf_counter() - started) * 1e6)
        answer["bytes"] = len(data)
        stream.write(json.dumps(answer).encode() + b"\n" + data)


def make_compile(message: JsonMessage) -> Callable[[Grammar], bytes]:
    """Load the vocabulary that the first line names; return a compiler for it, which raises GrammarError."""
    message["eos_token_ids"] = tuple(message["eos_token_ids"])
    source = VocabularySource(**message)
    compiler = Compiler(source)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def compile_(grammar: Grammar) -> bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_BYTES, used + MAX_BYTES))
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
    """Refuse a grammar of which the library ignores a part, as it reports only on standard error.

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
