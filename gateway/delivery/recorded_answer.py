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
            if has_new_owner:
                if not self._answers.is_owned(reading) and recorder.continues(reading):
                    await self._take_back(recorder, reading)
                    return False
                # A name that was damaged on the way is not damaged in the same way again.
                again = await self._answers.records.read(self.name, recorder.written)
                if again is None or again.owner != reading.owner:
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


def _read_end(end: bytes) -> tuple[()]:
    content = orjson.loads(end)
    if content.get("cancelled"):
        raise RequestFailedError(CANCELLED)
    if "failure" in content:
        raise RequestFailedError(decode_failure(content["failure"]))
    return ()
