"""Threads that encode, shared fairly: no tenant and no long text can occupy all of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from services.tokenizer import metrics
from services.tokenizer.encoding import size
from services.tokenizer.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from common.requests import ChatPrompt, Prompt
    from common.types import Subject
    from services.tokenizer.encoding import Encoded, PromptEncoder

T = TypeVar("T")

# Prompts of one subject that arrive together are encoded together up to this size.
JOB_CHARACTERS = 16_384
# Longer texts take more than some 60 ms and cannot be interrupted: one thread does not accept them.
LONG_CHARACTERS = 65_536
# The cost of a job in addition to its text, in characters: the round trip to a thread.
JOB_COST = 256
# The cost of decoding a token, in characters.
DECODED_CHARACTERS = 4


@dataclass(slots=True, eq=False)
class _Job:
    """Work for one thread, and the event loop's future for its result."""

    work: Callable[[], object]
    is_long: bool
    result: asyncio.Future[object]


class EncodingPool:
    """Runs an encoder in threads.

    Tenants share the threads, and in each tenant its subjects, by the number of characters that they have encoded
    (`FairQueue`). Running jobs are not interrupted, and long texts start only while another thread is left for shorter
    ones. So the first text of a tenant that had none recently waits for a thread and for at most one text of each other
    tenant; with two threads or more, a text of up to `LONG_CHARACTERS` never waits for a longer one of another subject.
    """

    def __init__(self, encoder: PromptEncoder, executor: Executor, threads: int) -> None:
        """Encode in `executor`, which has `threads` threads and which the caller shuts down."""
        self.encoder = encoder
        self._executor = executor
        self._threads = threads
        self._queue: FairQueue[_Job] = FairQueue()
        self._running = 0
        self._running_long = 0

    async def encode(
        self, subject: Subject, prompts: Sequence[Prompt], add_special_tokens: Sequence[bool | None]
    ) -> Sequence[Encoded]:
        """Encode prompts of one subject that arrived together."""
        started = time.perf_counter()
        if self.encoder.is_quick(prompts):
            encoded: Sequence[Encoded] = self.encoder.encode(prompts, add_special_tokens)
        else:
            pairs = list(zip(prompts, add_special_tokens, strict=True))
            jobs = [self._encode_part(subject, part) for part in _parts(pairs)]
            encoded = [result for results in await asyncio.gather(*jobs) for result in results]
        metrics.ENCODE_SECONDS.observe(time.perf_counter() - started)
        return encoded

    async def ban(self, subject: Subject, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of `words`; see `PromptEncoder.ban`."""
        return await self._run(subject, sum(map(len, words)), lambda: self.encoder.ban(words))

    async def tokenize(self, subject: Subject, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Return the ids of a text and their vocabulary entries."""
        return await self._run(
            subject, len(text), lambda: self.encoder.encode_text(text, add_special_tokens=add_special_tokens)
        )

    async def detokenize(self, subject: Subject, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        return await self._run(
            subject,
            len(token_ids) * DECODED_CHARACTERS,
            lambda: self.encoder.decode(token_ids, skip_special_tokens=skip_special_tokens),
        )

    async def render(self, subject: Subject, chat: ChatPrompt) -> tuple[str, list[int]]:
        """Return the rendered prompt of a conversation, as text and ids."""
        return await self._run(subject, size(chat), lambda: self.encoder.render(chat))

    async def _encode_part(self, subject: Subject, part: Sequence[tuple[Prompt, bool | None]]) -> Sequence[Encoded]:
        prompts, adds = [prompt for prompt, _ in part], [add for _, add in part]
        return await self._run(subject, sum(map(size, prompts)), lambda: self.encoder.encode(prompts, adds))

    async def _run(self, subject: Subject, characters: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread in its fair turn; a caller that is cancelled before that leaves the queue."""
        job = _Job(work, characters > LONG_CHARACTERS, asyncio.get_running_loop().create_future())
        self._queue.add(subject, job, characters + JOB_COST)
        self._fill()
        try:
            return cast("T", await job.result)  # `T` is the return type of the job's work
        finally:
            self._queue.remove(subject, job)

    def _fill(self) -> None:
        """Start jobs while threads are free."""
        while self._running < self._threads and (job := self._queue.take(self._may_start)) is not None:
            self._running += 1
            self._running_long += job.is_long
            running = asyncio.get_running_loop().run_in_executor(self._executor, job.work)
            running.add_done_callback(lambda done, job=job: self._finish(job, done))  # type: ignore[misc]

    def _may_start(self, job: _Job) -> bool:
        return not job.is_long or self._running_long < max(1, self._threads - 1)

    def _finish(self, job: _Job, done: asyncio.Future[object]) -> None:
        self._running -= 1
        self._running_long -= job.is_long
        if done.cancelled():
            job.result.cancel()
        elif (error := done.exception()) is not None:
            if not job.result.done():
                job.result.set_exception(error)
        elif not job.result.done():
            job.result.set_result(done.result())
        self._fill()


def _parts(pairs: Sequence[tuple[Prompt, bool | None]]) -> Iterator[Sequence[tuple[Prompt, bool | None]]]:
    """Divide prompts into parts of about `JOB_CHARACTERS`; a longer prompt is a part of its own."""
    part: list[tuple[Prompt, bool | None]] = []
    characters = 0
    for pair in pairs:
        length = size(pair[0])
        if part and characters + length > JOB_CHARACTERS:
            yield part
            part, characters = [], 0
        part.append(pair)
        characters += length
    if part:
        yield part
