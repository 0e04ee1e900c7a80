"""The answer to one HTTP request as deliveries read it, whichever gateway generates it.

A plain answer is a generation of this gateway. A recorded answer is also written to a record before it is delivered, so
that it can be continued: after its gateway's death, or after its client's connection broke. Its reader either owns the
record and generates, or follows what the owner writes; a reader whose owner has released the record, or has died, takes
it over and generates the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from common.errors import PandoError, QueueFullError, RequestFailedError, UnavailableError
from common.logs import get_logger
from common.room import SharedRoom
from common.types import ErrorCode, RequestFailure
from gateway.answer_records.recorder import Recorder
from gateway.delivery.progress import Progress
from gateway.generation.generation import STUCK
from gateway.generation.generations import SHUTDOWN, original_id, renamed
from gateway.generation.journal import number_choices, restore
from gateway.generation.update_lines import decode_failure, decode_updates, encode_failure, encode_updates
from gateway.generation.usage import Usage, usage_of
from gateway.ledger.entries import Tokens, Work, cached_amount
from gateway.quotas.meters import ChargeKind
from gateway.quotas.quotas import Charge, announced_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from common.requests import GenerateRequest
    from gateway.answer_records.records import AnswerRecords, RecordReading
    from gateway.generation.generation import Generation
    from gateway.generation.generations import Generations
    from gateway.generation.journal import ChoiceUpdate, JournalEntry
    from gateway.ledger.ledger import Ledger
    from gateway.quotas.quotas import Lease, Quotas

# How often a reader looks for what the owner has written.
POLL_S = 0.05
RETRY_S = 0.5
MAX_FOLLOWERS = 4096
# Answers whose use is noted in one turn of the event loop, which takes a fraction of a millisecond.
NOTED_AT_ONCE = 16
GONE = RequestFailure(
    ErrorCode.UNAVAILABLE,
    "the answer's record is gone: it failed before its first token, or it has expired",
    retryable=True,
)
CANCELLED = RequestFailure(ErrorCode.INVALID_REQUEST, "the response was cancelled")
CANCELLED_END = b'{"cancelled":true}'
# Failures of the connection or the gateway, after which the answer can be continued.
PASSING = (SHUTDOWN, STUCK)


class Answer(Protocol):
    """The output of one HTTP request for one reader."""

    @property
    def entries(self) -> Sequence[JournalEntry]:
        """The requests with their choices."""

    @property
    def usage(self) -> Usage:
        """Token counts so far."""

    @property
    def is_complete(self) -> bool:
        """Whether the end of the answer is known and final."""

    async def begin(self, cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        """Submit the requests or find the record; return headers. `cut` ends a reader that is too slow.

        Raises:
            PandoError: the requests are refused.
        """

    async def next_updates(self) -> Sequence[ChoiceUpdate] | None:
        """Wait for updates and return all that are pending; empty at the end, None after a nudge.

        Raises:
            PandoError: the answer failed, and all updates before the failure have been returned.
        """

    def nudge(self) -> None:
        """Wake the reader without an update."""

    async def conclude(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Finish after the last update or the failure; await `keep` first if this reader is the one that generated."""

    def close(self, cause: str | None) -> None:
        """Stop reading; what is still generated is aborted, counted in the metrics under `cause`."""


class AnswerContext:
    """The parts that answers share: generations, quotas, ledger, and the records with their background work."""

    def __init__(self, generations: Generations, records: AnswerRecords, quotas: Quotas, ledger: Ledger) -> None:
        self.generations = generations
        self.records = records
        self.quotas = quotas
        self.ledger = ledger
        # The generations of answers that are open here, and how often each had changed when its use was last noted.
        self.running: dict[Generation, int] = {}
        self.followers = SharedRoom(MAX_FOLLOWERS, "following recorded answers", 1000)
        self.recorders: set[Recorder] = set()
        self._numbers = itertools.count()
        self._owners: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("answers")

    def new_owner(self) -> str:
        """Return a name of an owner that has not been used before, for use until `forget_owner`."""
        owner = f"{self.records.gateway_id}:{next(self._numbers)}"
        self._owners.add(owner)
        return owner

    def forget_owner(self, owner: str) -> None:
        """Let records that say that they have this owner be taken over."""
        self._owners.discard(owner)

    def is_owned(self, reading: RecordReading) -> bool:
        """Whether a living reader owns the record.

        Gateways know their own owners: another name of theirs is that of a reader that has ended, or that was told that
        it did not get the record; or it is damaged.
        """
        if not reading.is_owned or reading.owner is None:
            return False
        return reading.owner in self._owners or not reading.owner.startswith(f"{self.records.gateway_id}:")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` independently of a client; its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_done)

    def insist(self, write: Callable[[], Awaitable[object]], then: Callable[[], None] = lambda: None) -> None:
        """Repeat `write` until the records are available, for as long as records are kept; call `then` at the end."""
        self.spawn(self._insist(write, then))

    async def run(self) -> None:
        """Prolong the records of answers that are generated here, until cancelled."""
        while True:
            await asyncio.sleep(max(self.records.lifetime_s / 4, 1.0))
            with contextlib.suppress(UnavailableError):
                await self.records.keep([recorder.name for recorder in self.recorders])

    async def keep_ledger(self) -> None:
        """Write the use of open answers to the ledger when it has changed, until cancelled."""
        await self.ledger.run(self._note_running)

    def note_use(self, entries: Sequence[JournalEntry], *, has_ended: bool = False) -> None:
        """Note in the ledger what requests have used so far; `has_ended`: the whole answer has."""
        for entry in entries:
            usage, request = usage_of((entry,)), entry.request
            if usage.total:
                options = request.options
                work = Work(request.model, options.adapter, request.operation, options.is_batch)
                subject, tokens = request.view.subject, tokens_of(usage)
                self.ledger.note(original_id(request), subject, work, tokens, has_ended=has_ended)

    async def _note_running(self) -> None:
        """Note the use that has changed, in slices between which the event loop delivers tokens."""
        changed = [generation for generation, noted in self.running.items() if generation.changes != noted]
        for number, generation in enumerate(changed, start=1):
            if generation in self.running:
                self.running[generation] = generation.changes
                self.note_use(generation.entries)
            if number % NOTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def close(self, limit_s: float = 1.0) -> None:
        """Give the writes that are under way `limit_s` to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        for task in self._tasks:
            task.cancel()

    async def _insist(self, write: Callable[[], Awaitable[object]], then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.records.lifetime_s
        try:
            while loop.time() < until:
                try:
                    await write()
                except UnavailableError:
                    await asyncio.sleep(RETRY_S)
                else:
                    return
        finally:
            then()

    def _note_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PandoError):
            self._log.warning("answer.failed", reason=error.message)
        else:
            self._log.error("answer.failed", exc_info=error)


def tokens_of(usage: Usage) -> Tokens:
    """Return the ledger's charge for one request."""
    cached = {cached_amount(part.tier, part.level): part.tokens for prompt in usage.prompts for part in prompt.cached}
    return Tokens(
        1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.forced_tokens, usage.drafted_tokens
    )._replace(**cached)


class PlainAnswer:
    """Implements `Answer` without a record: it ends with its client's connection."""

    def __init__(self, answers: AnswerContext, requests: Sequence[GenerateRequest], buffer_bytes: int | None) -> None:
        """At most about `buffer_bytes` of output wait for a slow client."""
        self.entries = number_choices(requests)
        self._run = _Run(answers, buffer_bytes)
        self._has_ended = False

    @property
    def usage(self) -> Usage:
        return usage_of(self.entries)

    @property
    def is_complete(self) -> bool:
        return self._has_ended

    async def begin(self, cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        return await self._run.start(self.entries, cut)

    async def next_updates(self) -> Sequence[ChoiceUpdate] | None:
        return await self._run.generation.next_updates()

    def nudge(self) -> None:
        self._run.generation.nudge()

    async def conclude(self, keep: Callable[[], Awaitable[None]]) -> None:
        self._has_ended = True
        await self._run.charge()
        await keep()

    def close(self, cause: str | None) -> None:
        self._run.close(cause, has_ended=True)


class RecordedAnswer:
    """Implements `Answer` over a record."""

    def __init__(
        self,
        answers: AnswerContext,
        name: str,
        requests: Sequence[GenerateRequest],
        *,
        owner: str | None,
        created_at: float,
        buffer_bytes: int | None = None,
    ) -> None:
        """Read the answer in the record `name` to `requests`, which were created at `created_at` (Unix time).

        `owner` is this reader if it has just opened the record; None reads what is recorded, and takes the record over
        if necessary.
        """
        self.name = name
        self._answers = answers
        self._requests = requests
        self._created_at = created_at
        self._recorder = None if owner is None else Recorder(answers.records, name, owner)
        self.entries = number_choices(requests if owner else [renamed(request) for request in requests])
        self._run = _Run(answers, buffer_bytes)
        self._cut: Callable[[], None] = lambda: None
        self._follows = False
        # The owner has died: its place among the open requests of its subject is still taken.
        self._inherits = False
        # Chunks that have been read from the record.
        self._chunks = 0
        self._progress = Progress()
        # Updates that `begin` has read, for the first call of `next_updates`.
        self._early: Sequence[ChoiceUpdate] = ()
        self._failure: RequestFailure | None = None
        self._has_ended = False
        self._nudged = asyncio.Event()

    @property
    def usage(self) -> Usage:
        return usage_of(self.entries)

    @property
    def is_complete(self) -> bool:
        return self._has_ended

    async def begin(self, cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        self._cut = cut
        if self._recorder is None:
            self._answers.followers.take(self._requests[0].view.subject)
            self._follows = True
            # A refusal to take the record over is known before anything is sent.
            reading, self._early = await self._read()
            if reading.end is None and not self._answers.is_owned(reading):
                await self._take_over(reading)
            return []
        try:
            headers = await self._run.start(self.entries, cut)
        except BaseException:
            with contextlib.suppress(UnavailableError):
                await self._answers.records.drop(self.name)
            raise
        self._answers.recorders.add(self._recorder)
        return headers

    async def adopt(self) -> bool:
        """Begin; return False if the answer has ended or a living gateway owns it."""
        await self.begin(lambda: None)
        return self._recorder is not None

    async def next_updates(self) -> Sequence[ChoiceUpdate] | None:
        if self._early:
            early, self._early = self._early, []
            return early
        while True:
            if self._recorder is None:
                updates = await self._follow()
                if updates is None or updates or self._has_ended:
                    return updates
            else:
                updates = await self._generate(self._recorder)
                # Empty at the end of the generation, and if this reader has to follow from now on.
                if updates is None or updates or self._recorder is not None:
                    return updates

    def nudge(self) -> None:
        if self._recorder is None:
            self._nudged.set()
        else:
            self._run.generation.nudge()

    async def conclude(self, keep: Callable[[], Awaitable[None]]) -> None:
        recorder = self._recorder
        if recorder is None or self._failure in PASSING:
            return
        self._has_ended = True
        await self._run.charge()
        if self._failure is not None:
            # In this order: an answer that was cancelled has ended already.
            if await self._finish(recorder, {"failure": encode_failure(self._failure)}):
                await keep()
            return
        # In this order: if the gateway dies in between, another one keeps it again.
        await keep()
        await self._finish(recorder, {})

    def close(self, cause: str | None) -> None:
        if self._follows:
            self._answers.followers.give_back(self._requests[0].view.subject)
            self._follows = False
        recorder = self._recorder
        if recorder is None:
            return
        self._stand_down(cause)
        if self._has_ended:
            self._answers.forget_owner(recorder.owner)
        elif self._failure is None or self._failure in PASSING:
            self._release(recorder, self.usage.total)
        else:
            # The client has received nothing but an error: its retry is a new request.
            self._answers.forget_owner(recorder.owner)
            self._answers.insist(lambda: self._answers.records.drop(self.name))

    def _release(self, recorder: Recorder, charged: int) -> None:
        self._answers.insist(lambda: recorder.release(charged), lambda: self._answers.forget_owner(recorder.owner))

    async def _finish(self, recorder: Recorder, content: dict[str, object]) -> bool:
        end = orjson.dumps(content)
        try:
            return await recorder.finish(end)
        except UnavailableError:
            self._answers.insist(lambda: recorder.finish(end))
            return True

    async def _generate(self, recorder: Recorder) -> Sequence[ChoiceUpdate] | None:
        while True:
            try:
                updates = await self._run.generation.next_updates()
            except RequestFailedError as error:
                self._failure = error.failure
                raise
            if not updates:
                return updates
            if not await recorder.append(encode_updates(updates)) and await self._has_lost(recorder):
                return ()
            # Empty while the client has what the record lacked when this reader took it over.
            if new := self._progress.news(updates):
                return new

    async def _has_lost(self, recorder: Recorder) -> bool:
        """Follow the record from its beginning if it is lost: this gateway was taken for dead, or it was cancelled.

        Return False unless that is certain: a refusal may be due to a damaged message, and the next chunk is written.
        """
        try:
            reading = await self._answers.records.read(self.name, recorder.written)
            if reading is None or (reading.end is None and reading.owner == recorder.owner):
                return False
            has_new_owner = reading.end is None
            if has_new_owner and not self._answers.is_owned(reading) and recorder.continues(reading):
                await self._take_back(recorder, reading)
                return False
        except UnavailableError:
            return False
        self._stand_down(None, settles=not has_new_owner)
        self._answers.forget_owner(recorder.owner)
        self.entries = number_choices([renamed(request) for request in self._requests])
        self._chunks = 0
        self._progress.rewind()
        return True

    async def _take_back(self, recorder: Recorder, reading: RecordReading) -> None:
        """Own a record again whose owner's name was damaged, or whose new owner has died without writing to it."""
        owner = self._answers.new_owner()
        is_taken = False
        try:
            is_taken = await self._answers.records.take(self.name, reading.owner, owner, reading.written)
        finally:
            former, recorder.owner = (recorder.owner, owner) if is_taken else (owner, recorder.owner)
            self._answers.forget_owner(former)

    async def _follow(self) -> Sequence[ChoiceUpdate] | None:
        """Return the new updates of the record; empty also if the answer has ended or is generated here from now on."""
        try:
            reading, new = await self._read()
        except UnavailableError:
            return await self._pause(RETRY_S)
        if new:
            return new
        if reading.end is not None:
            self._has_ended = True
            return _read_end(reading.end)
        if not self._answers.is_owned(reading):
            try:
                await self._take_over(reading)
            except (UnavailableError, QueueFullError):
                # The client has a part of the answer: it waits until there is a place for the rest.
                return await self._pause(RETRY_S)
            return ()
        return await self._pause(POLL_S)

    async def _pause(self, seconds: float) -> Sequence[ChoiceUpdate] | None:
        """Wait for `seconds` or a nudge, without an update."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._nudged.wait()
        if self._nudged.is_set():
            self._nudged.clear()
            return None
        return ()

    async def _read(self) -> tuple[RecordReading, Sequence[ChoiceUpdate]]:
        """Read the record's new chunks; return those of their updates that this reader has not returned."""
        reading = await self._answers.records.read(self.name, self._chunks)
        if reading is None:
            raise RequestFailedError(GONE)
        updates = [update for chunk in reading.chunks for update in decode_updates(chunk)]
        restore(self.entries, updates)
        self._chunks += len(reading.chunks)
        return reading, self._progress.news(updates)

    async def _take_over(self, reading: RecordReading) -> None:
        """Become the owner and generate the rest, unless another gateway was faster."""
        owner, records = self._answers.new_owner(), self._answers.records
        self._inherits = self._inherits or reading.owner is not None
        is_taken = False
        try:
            is_taken = await records.take(self.name, reading.owner, owner, self._chunks)
        finally:
            # If the answer to this call was lost, the record may say that it has this owner.
            if not is_taken:
                self._answers.forget_owner(owner)
        if not is_taken:
            return
        recorder = Recorder(records, self.name, owner, self._chunks)
        try:
            kind = ChargeKind.INHERITED if self._inherits else ChargeKind.CONTINUED
            await self._run.resume(self.entries, self._cut, kind, self._created_at, reading.charged)
        except BaseException:
            self._release(recorder, self._run.charged)
            raise
        self._recorder = recorder
        self._answers.recorders.add(recorder)

    def _stand_down(self, cause: str | None, *, settles: bool = True) -> None:
        assert self._recorder is not None
        self._answers.recorders.discard(self._recorder)
        self._recorder = None
        self._run.close(cause, settles=settles)


class _Run:
    """A generation of this gateway and its share of the quotas, from its start to its end; may be started again."""

    def __init__(self, answers: AnswerContext, buffer_bytes: int | None) -> None:
        self._answers = answers
        self._buffer_bytes = buffer_bytes
        self._generation: Generation | None = None
        self._lease: Lease | None = None
        # Tokens that have been charged for the answer, and those of them that `_lease` has taken.
        self.charged = 0
        self._taken = 0

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the answer is generated here"
        return self._generation

    async def start(self, entries: Sequence[JournalEntry], cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        """Charge for new requests and submit them; return headers with what is left of the quotas."""
        self._taken = self.charged = _announced(entries)
        charge = Charge(entries[0].request.view.subject, len(entries), self._taken, uses_model=True)
        return await self._open(entries, cut, charge, 0.0)

    async def resume(
        self,
        entries: Sequence[JournalEntry],
        cut: Callable[[], None],
        kind: ChargeKind,
        created_at: float,
        charged: int | None,
    ) -> None:
        """Submit the rest of requests for which `charged` tokens (None: those announced) have been charged before."""
        self._taken, self.charged = 0, _announced(entries) if charged is None else charged
        charge = Charge(entries[0].request.view.subject, len(entries), 0, kind=kind)
        await self._open(entries, cut, charge, max(time.time() - created_at, 0.0))

    async def charge(self) -> None:
        """Write the use of the answer to the ledger."""
        self._answers.note_use(self.generation.entries, has_ended=True)
        await self._answers.ledger.settle()

    def close(self, cause: str | None, *, settles: bool = True, has_ended: bool = False) -> None:
        """Abort what still runs, counted under `cause`. `has_ended`: nothing continues the answer.

        `settles` charges the difference to the tokens used; without it, another gateway will do that.
        """
        if self._generation is None or self._lease is None:
            return
        excess = self._generation.usage.total - self.charged if settles else 0
        self._answers.generations.close(self._generation, cause)
        self._answers.running.pop(self._generation, None)
        self._answers.note_use(self._generation.entries, has_ended=has_ended)
        self._lease.settle(self._taken + excess)
        self._generation = self._lease = None

    async def _open(
        self, entries: Sequence[JournalEntry], cut: Callable[[], None], charge: Charge, elapsed_s: float
    ) -> list[tuple[bytes, bytes]]:
        lease = await self._answers.quotas.take(charge)
        for entry in entries:
            entry.throttle(tenant=lease.throttles_tenant, subject=lease.throttles_subject)
        try:
            self._generation = self._answers.generations.open(
                entries, buffer_bytes=self._buffer_bytes, elapsed_s=elapsed_s
            )
        except BaseException:
            lease.settle(0)
            raise
        self._generation.on_overflow = cut
        self._answers.running[self._generation] = 0
        self._lease = lease
        return lease.headers()


def _announced(entries: Sequence[JournalEntry]) -> int:
    return sum(announced_tokens(entry.request) for entry in entries)


def _read_end(end: bytes) -> tuple[()]:
    content = orjson.loads(end)
    if content.get("cancelled"):
        raise RequestFailedError(CANCELLED)
    if "failure" in content:
        raise RequestFailedError(decode_failure(content["failure"]))
    return ()
