"""Answers that can be continued: after the death of their gateway, or after their client's connection broke.

They are written to a record before they are delivered. A reader either owns the record and generates, or follows what
the owner writes; a reader whose owner has released the record, or has died, takes it over and generates the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import orjson

from common.errors import QueueFullError, RequestFailedError, UnavailableError
from common.types import ErrorCode, RequestFailure
from gateway.answer_records.recorder import Recorder
from gateway.answer_records.records import Writing
from gateway.delivery.answer_context import RETRY_S
from gateway.delivery.answers import GenerationRun
from gateway.delivery.progress import Progress
from gateway.generation.generation import STUCK
from gateway.generation.generations import SHUTDOWN, renamed
from gateway.generation.journal import number_choices, restore
from gateway.generation.update_lines import decode_failure, decode_updates, encode_failure, encode_updates
from gateway.generation.usage import Usage, usage_of
from gateway.quotas.meters import ChargeKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from common.requests import GenerateRequest
    from gateway.answer_records.records import RecordReading
    from gateway.delivery.answer_context import AnswerContext
    from gateway.generation.journal import ChoiceUpdate

# How often a reader looks for what the owner has written.
POLL_S = 0.05
GONE = RequestFailure(
    ErrorCode.UNAVAILABLE,
    "the answer's record is gone: it failed before its first token, or it has expired",
    retryable=True,
)
CANCELLED = RequestFailure(ErrorCode.INVALID_REQUEST, "the response was cancelled")
CANCELLED_END = b'{"cancelled":true}'
# Failures of the connection or the gateway, after which the answer can be continued.
PASSING = (SHUTDOWN, STUCK)


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
        self._run = GenerationRun(answers, buffer_bytes)
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
        # The record has ended, though its last updates may not have been returned yet.
        self._has_read_end = False
        # The end is written when the records are available again.
        self._is_ending = False
        # Another gateway has taken the record over, which also charges for it.
        self._is_charged_elsewhere = False
        self._nudged = asyncio.Event()

    @property
    def usage(self) -> Usage:
        return usage_of(self.entries)

    @property
    def is_complete(self) -> bool:
        return self._has_ended or self._has_read_end

    @property
    def keeps_numbers(self) -> bool:
        return self._progress.keeps_portions

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
        self._stand_down(cause, settles=not self._is_charged_elsewhere)
        if self._has_ended:
            if not self._is_ending:
                self._answers.forget_owner(recorder.owner)
        elif self._failure is None or self._failure in PASSING:
            self._release(recorder, self.usage.total)
        else:
            # The client has received nothing but an error: its retry is a new request.
            self._answers.insist(lambda: self._drop(recorder), lambda: self._answers.forget_owner(recorder.owner))

    def _release(self, recorder: Recorder, charged: int) -> None:
        self._answers.insist(lambda: self._leave(recorder, charged), lambda: self._answers.forget_owner(recorder.owner))

    async def _leave(self, recorder: Recorder, charged: int) -> None:
        # The client may come back with the number of an event whose chunk waits.
        while not recorder.is_off and await recorder.flush() is not Writing.DONE:
            standing, _ = await self._standing(recorder)
            if standing is Writing.LOST:
                return
            if standing is Writing.GONE:
                recorder.stop()
        await self._answers.give_up(self.name, recorder.owner, charged)

    async def _drop(self, recorder: Recorder) -> None:
        await self._answers.records.drop(self.name)
        # It is still there if the message was damaged.
        await self._answers.give_up(self.name, recorder.owner, None)

    async def _finish(self, recorder: Recorder, content: dict[str, object]) -> bool:
        end = orjson.dumps(content)
        try:
            return await self._end(recorder, end)
        except UnavailableError:
            self._is_ending = True
            self._answers.insist(lambda: self._end(recorder, end), lambda: self._answers.forget_owner(recorder.owner))
            return True

    async def _end(self, recorder: Recorder, end: bytes) -> bool:
        """End the record, or leave it to its next reader if it lacks a part; return False if it had another end.

        Raises:
            UnavailableError: the records are unavailable; this may be repeated.
        """
        while not recorder.is_off:
            outcome = await recorder.finish(end)
            if outcome is Writing.DONE:
                return True
            standing, reading = await self._standing(recorder)
            if standing is Writing.LOST:
                assert reading is not None, "the record is there"
                self._is_charged_elsewhere = reading.owner != recorder.owner
                return reading.end == end
            if standing is Writing.GONE:
                recorder.stop()
                if reading is None:
                    return outcome is Writing.GONE
        await self._answers.give_up(self.name, recorder.owner, self.usage.total)
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
            outcome = await recorder.append(encode_updates(updates))
            if outcome is not Writing.DONE and await self._has_lost(recorder):
                return ()
            # Empty while the client has what the record lacked when this reader took it over.
            if new := self._progress.news(updates):
                return new

    async def _has_lost(self, recorder: Recorder) -> bool:
        """Follow the record from its beginning if it is lost: this gateway was taken for dead, or it was cancelled.

        Return False unless that is certain; the chunk is written with the next one.
        """
        try:
            standing, reading = await self._standing(recorder)
        except UnavailableError:
            return False
        if standing is Writing.GONE:
            recorder.stop()
        if standing is not Writing.LOST:
            return False
        assert reading is not None, "the record is there"
        # Who has cancelled the answer has left it its owner.
        self._stand_down(None, settles=reading.owner == recorder.owner)
        self._answers.forget_owner(recorder.owner)
        self.entries = number_choices([renamed(request) for request in self._requests])
        self._chunks = 0
        self._progress.rewind()
        return True

    async def _standing(self, recorder: Recorder) -> tuple[Writing, RecordReading | None]:
        """Return LOST if another gateway owns the record or it has ended, GONE if it is not there or lacks chunks.

        DONE unless that is certain: a refusal may be due to a damaged message or name.

        Raises:
            UnavailableError: the records are unavailable.
        """
        reading = await self._answers.records.read(self.name, recorder.written)
        if reading is None:
            return Writing.GONE, None
        if reading.end is None:
            if reading.owner == recorder.owner:
                return Writing.DONE if reading.written >= recorder.written else Writing.GONE, reading
            if not self._answers.is_owned(reading) and recorder.continues(reading):
                await self._take_back(recorder, reading)
                return Writing.DONE, reading
        # A name that was damaged on the way is not damaged in the same way again.
        again = await self._answers.records.read(self.name, recorder.written)
        if again is None or again.owner != reading.owner:
            return Writing.DONE, again
        return Writing.LOST, again

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
        self._has_read_end = reading.end is not None
        return reading, self._progress.news(updates)

    async def _take_over(self, reading: RecordReading) -> None:
        """Become the owner and generate the rest, unless another gateway was faster."""
        owner, records = self._answers.new_owner(), self._answers.records
        self._inherits = self._inherits or reading.owner is not None
        try:
            is_taken = await records.take(self.name, reading.owner, owner, self._chunks)
        except BaseException:
            # The record may have this owner nevertheless, for which readers of other gateways would wait.
            self._answers.forget_owner(owner)
            self._answers.insist(lambda: self._answers.give_up(self.name, owner, None))
            raise
        if not is_taken:
            self._answers.forget_owner(owner)
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


def _read_end(end: bytes) -> tuple[()]:
    content = orjson.loads(end)
    if content.get("cancelled"):
        raise RequestFailedError(CANCELLED)
    if "failure" in content:
        raise RequestFailedError(decode_failure(content["failure"]))
    return ()
