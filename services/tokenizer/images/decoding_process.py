"""A process that decodes images, as the tokenizer sees it.

Its pipes are written and read by a thread, which is blocked most of the time: the event loop would be woken for each
piece that a pipe holds, and would copy it, megabytes for each image.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from services.tokenizer.images.child import LENGTH, write_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.requests import ImageFile
    from services.tokenizer.images.processor import JsonObject

T = TypeVar("T")

COMMAND = (sys.executable, "-m", "services.tokenizer.images.child")
# What a process gets of the environment, which may hold secrets.
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG")
START_TIMEOUT_S = 60.0
# For the end of a process that was killed.
END_TIMEOUT_S = 10.0
# How long an image is decoded on after its request was cancelled, before its process is replaced.
ABANDONED_S = 1.0
MAX_ANSWER_BYTES = 4096
# Of a pipe, the most that Linux lets any process ask for: an image crosses it in few pieces.
PIPE_BYTES = 1024 * 1024


class DecodingProcess:
    """One process, which decodes one image after the other."""

    def __init__(self, process: asyncio.subprocess.Process, questions: int, answers: int) -> None:
        """Use a process that waits for its first image, and the descriptors of its pipes, which are closed later."""
        # Whether the kernel limits what it can call.
        self.is_filtered = False
        self._process = process
        self._questions = os.fdopen(questions, "wb")
        self._answers = os.fdopen(answers, "rb")
        # Of one thread, which alone uses the pipes.
        self._thread = ThreadPoolExecutor(1, "images")
        self._is_closed = False

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> DecodingProcess:
        """Start a process and wait until it is confined.

        Raises:
            OSError, TimeoutError, ValueError, EOFError: it does not start.
        """
        variables = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        with contextlib.ExitStack() as own, contextlib.ExitStack() as others:
            its_input, questions = _pipe(others, own)
            answers, its_output = _pipe(own, others)
            process = await asyncio.create_subprocess_exec(
                *COMMAND, str(os.getpid()), *arguments, stdin=its_input, stdout=its_output,
                # Threads could not be started, and their stacks would count as memory.
                env={**variables, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            own.pop_all()
        started = cls(process, questions, answers)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                started.is_filtered = bool((await started._in_thread(started._read_object))["is_filtered"])
        except BaseException:
            await started.kill()
            raise
        return started

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    async def decode(self, file: ImageFile, max_bytes: int) -> tuple[JsonObject, bytes]:
        """Return the answer to an image, and its values of at most `max_bytes`. After an error, kill the process.

        Raises:
            OSError, EOFError: the process has ended.
            ValueError, RecursionError: the answer is malformed.
        """
        return await self._in_thread(lambda: self._exchange(file, max_bytes))

    async def exit_status(self) -> int | None:
        """Wait for a process that has closed its output to end; return the negative number of the signal that ended it.

        None: it does not end soon.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABANDONED_S):
                await self._process.wait()
        return self._process.returncode

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    await asyncio.shield(self._process.wait())
        finally:
            if not self._is_closed:
                self._is_closed = True
                # After an exchange, which ends with the process.
                self._thread.submit(self._close)
                self._thread.shutdown(wait=False)

    async def _in_thread(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, step)

    def _exchange(self, file: ImageFile, max_bytes: int) -> tuple[JsonObject, bytes]:
        question = {
            "detail": file.detail, "frames": len(file.frames), "is_video_file": file.is_video_file,
            "rate": file.frames_per_second,
        }  # fmt: skip
        write_frame(self._questions, json.dumps(question).encode(), *(file.frames or (file.data,)))
        return self._read_object(), self._read(max_bytes)

    def _read_object(self) -> JsonObject:
        answer = json.loads(self._read(MAX_ANSWER_BYTES))
        if not isinstance(answer, dict):
            raise ValueError("an object is expected")
        return answer

    def _read(self, max_bytes: int) -> bytes:
        length = LENGTH.unpack(self._read_exactly(LENGTH.size))[0]
        if length > max_bytes:
            raise ValueError(f"a part of {length} bytes")
        return self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytes:
        read = self._answers.read(length)
        if len(read) < length:
            raise EOFError(f"{len(read)} of {length} bytes")
        return read

    def _close(self) -> None:
        self._answers.close()
        # What could not be written is written again.
        with contextlib.suppress(OSError):
            self._questions.close()


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a new pipe, which the stacks close."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    # Not on every system, nor beyond a user's share of memory for pipes.
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read, write
