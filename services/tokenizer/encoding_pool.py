"""Threads that encode, shared fairly: no tenant, no subject and no long text can occupy all of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from services.tokenizer import metrics
from services.tokenizer.encoding import size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
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
Item = TypeVar("Item")
# Number of parties without work that are kept before those without effect are dropped.
MAX_ABSENT = 1024


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


class Shares:
    """Virtual times of parties that share work, as in weighted fair queueing (Demers, Keshav and Shenker, 1989).

    A party's time advances by the cost of its work, and the earliest party is next. The present advances by each
    party's fair share. A party that returns after a pause starts at the present, so that it cannot accumulate credit,
    and keeps its lead over the present, so that leaving gains nothing.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._now = 0.0
        # The advance of the present for the work started last, applied with the next charge: a party that joins in
        # between precedes the next work of that party.
        self._begun = 0.0

    def join(self, party: str) -> None:
        """Add a party, at the present or at its own later time."""
        self._times[party] = max(self._times.get(party, 0.0), self._now)

    def knows(self, party: str) -> bool:
        """Return whether the party has joined and is not forgotten."""
        return party in self._times

    def in_order(self, parties: Collection[str]) -> Iterator[str]:
        """Yield joined parties by their virtual time. Callers usually need only the first."""
        first = min(parties, key=self._times.__getitem__)
        yield first
        yield from sorted((party for party in parties if party != first), key=self._times.__getitem__)

    def charge(self, party: str, cost: float, parties: int) -> None:
        """Charge `party` for work, while `parties` parties have work."""
        self._now += self._begun
        self._begun = cost / parties
        self._times[party] += cost

    def forget_absent(self, present: Collection[str]) -> None:
        """Drop parties that are not `present` and not ahead of the present time."""
        if len(self._times) > len(present) + MAX_ABSENT:
            kept = {party: time for party, time in self._times.items() if party in present or time > self._now}
            self._times = kept


class FairQueue(Generic[Item]):
    """A queue that preserves the order of each subject's items and shares service fairly.

    While two tenants, or two subjects of one, have items, the costs of the items taken from each grow alike: they never
    differ by more than the largest item of each. The first item of a subject waits for a bounded number of others, no
    matter how many names join and leave.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, deque[tuple[Item, float]]]] = {}
        self._clear()

    def add(self, subject: Subject, item: Item, cost: float) -> None:
        """Append an item to its subject's; `cost` is positive."""
        if subject.tenant not in self._waiting:
            self._waiting[subject.tenant] = {}
            self._tenants.join(subject.tenant)
            self._subjects.setdefault(subject.tenant, Shares())
        subjects = self._waiting[subject.tenant]
        if subject.name not in subjects:
            subjects[subject.name] = deque()
            self._subjects[subject.tenant].join(subject.name)
        subjects[subject.name].append((item, cost))

    def take(self, may_start: Callable[[Item], bool]) -> Item | None:
        """Remove and return the next first item of a subject that may start; None if there is none."""
        for tenant in self._tenants.in_order(self._waiting) if self._waiting else ():
            subjects, shares = self._waiting[tenant], self._subjects[tenant]
            for subject in shares.in_order(subjects):
                item, cost = subjects[subject][0]
                if may_start(item):
                    self._tenants.charge(tenant, cost, len(self._waiting))
                    shares.charge(subject, cost, len(subjects))
                    subjects[subject].popleft()
                    self._drop_if_empty(tenant, subject)
                    return item
        return None

    def charge(self, subject: Subject, cost: float) -> None:
        """Charge a subject for work that took more than the cost of its items, unless it is forgotten already."""
        shares = self._subjects.get(subject.tenant)
        if shares is not None and self._tenants.knows(subject.tenant) and shares.knows(subject.name):
            subjects = self._waiting.get(subject.tenant, {})
            self._tenants.charge(subject.tenant, cost, len({*self._waiting, subject.tenant}))
            shares.charge(subject.name, cost, len({*subjects, subject.name}))

    def remove(self, subject: Subject, item: Item) -> bool:
        """Remove an item; return whether it was waiting."""
        waiting = self._waiting.get(subject.tenant, {}).get(subject.name, ())
        for index, (found, _) in enumerate(waiting):
            if found is item:
                del self._waiting[subject.tenant][subject.name][index]
                self._drop_if_empty(subject.tenant, subject.name)
                return True
        return False

    def _drop_if_empty(self, tenant: str, subject: str) -> None:
        subjects = self._waiting[tenant]
        if not subjects[subject]:
            del subjects[subject]
            self._subjects[tenant].forget_absent(subjects)
        if not subjects:
            del self._waiting[tenant]
        if not self._waiting:
            self._clear()

    def _clear(self) -> None:
        """Reset all shares: without waiting items, past use does not matter."""
        self._tenants = Shares()
        self._subjects: dict[str, Shares] = {}
