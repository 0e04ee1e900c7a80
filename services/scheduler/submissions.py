"""One stream of requests: those with a grammar reach the loop once it is compiled, the others at once.

Images of which a request has no pixels get those that an earlier request of its view has left, so that a request in the
core always has all of its pixels, whatever becomes of its KV, its embeddings, or its row.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from common.errors import InvalidRequestError, PandoError
from common.grammars import GrammarScope
from common.recent_images import NOT_KEPT, pixels_key
from common.room import SharedRoom
from common.types import Admission, ErrorCode, RequestFailure, pixel_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.grammars import Grammar
    from common.recent_images import RecentImages
    from common.types import Pixels, RequestId, RoleWish, RowImage, ScheduleRequest, Subject

# Maximum number of requests of one stream that wait for their grammars.
MAX_WAITING = 1024
# Maximum bytes of the pixels of their images.
MAX_WAITING_PIXELS = 256 * 1024 * 1024
RETRY_AFTER_MS = 1000
ABORTED = RequestFailure(ErrorCode.UNAVAILABLE, "the request was aborted")
LACKS_IMAGES = RequestFailure(ErrorCode.UNAVAILABLE, NOT_KEPT, retryable=True, retry_after_ms=0)


@dataclass(frozen=True, slots=True)
class Batch:
    """One message of a tokenizer: requests, or refusals of those that could not be decoded, and aborts."""

    requests: tuple[ScheduleRequest | Admission, ...] = ()
    aborts: tuple[RequestId, ...] = ()
    # Whether another group would serve now; None: as before.
    others_serve: bool | None = None
    role_wish: RoleWish | None = None


class TakesRequests(Protocol):
    """The part of the scheduler's loop that a stream uses."""

    def submit(self, request: ScheduleRequest) -> Admission:
        """Submit a request, or return an admission with the reason for its refusal."""

    def abort(self, request_id: RequestId) -> None:
        """Abort a request; unknown ids are ignored."""

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar; raises PandoError if it is refused."""

    def note_others(self, tokenizer: object, *, serve: bool) -> None:
        """Record whether `tokenizer` could send requests to another group."""

    def wish_role(self, wish: RoleWish) -> None:
        """Change the role of this group if that may be now."""


class Submissions:
    """Handles one stream, on the event loop."""

    def __init__(self, loop: TakesRequests, images: RecentImages[Pixels]) -> None:
        """Submit to `loop`; pixels are kept in `images`, which all streams share."""
        self._loop = loop
        self._images = images
        self._waiting: dict[RequestId, asyncio.Task[None]] = {}
        # Each request's subject, and the bytes of its pixels.
        self._held: dict[RequestId, tuple[Subject, int]] = {}
        self._room = SharedRoom(MAX_WAITING, "waiting for grammars", RETRY_AFTER_MS)
        self._image_room = SharedRoom(MAX_WAITING_PIXELS, "waiting for grammars with images", RETRY_AFTER_MS)
        self._has_all = False
        # None marks the end.
        self._answers: asyncio.Queue[list[Admission] | Exception | None] = asyncio.Queue()

    async def read(self, batches: AsyncIterator[Batch]) -> None:
        """Submit the peer's batches until its end of the stream."""
        try:
            async for batch in batches:
                self._take(batch)
        except Exception as error:  # noqa: BLE001  (raised again by the task that answers)
            self._answers.put_nowait(error)
        else:
            self._has_all = True
            self._end_if_done()

    async def answers(self) -> AsyncIterator[list[Admission]]:
        """Yield admissions; requests of one message that are admitted at once are answered together.

        Raises:
            Exception: the exception raised by `read`.
        """
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def confirm(self) -> None:
        """Answer without an admission, which shows the peer that the stream is alive."""
        self._answers.put_nowait([])

    def close(self) -> None:
        """Cancel the requests that still wait."""
        self._loop.note_others(self, serve=False)
        for task in self._waiting.values():
            task.cancel()

    def _take(self, batch: Batch) -> None:
        if batch.others_serve is not None:
            self._loop.note_others(self, serve=batch.others_serve)
        if batch.role_wish is not None:
            self._loop.wish_role(batch.role_wish)
        admissions = [self._submit(request) for request in batch.requests]
        for request_id in batch.aborts:
            self._abort(request_id)
        known = [admission for admission in admissions if admission is not None]
        if known:
            self._answers.put_nowait(known)

    def _submit(self, submitted: ScheduleRequest | Admission) -> Admission | None:
        """Return the admission, or None if it follows later."""
        if isinstance(submitted, Admission):
            return submitted
        completed = self._with_pixels(submitted)
        if completed is None:
            return Admission(submitted.request_id, len(submitted.token_ids), LACKS_IMAGES, lacks_images=True)
        request = _with_scope(completed)
        grammar = request.options.sampling.grammar
        try:
            if grammar is None:
                return self._submit_now(request)
            if request.request_id in self._waiting:
                raise InvalidRequestError(f"request id {request.request_id} is in use", param="request_id")
            self._hold(request)
        except PandoError as error:
            return Admission(request.request_id, len(request.token_ids), error.to_failure())
        self._waiting[request.request_id] = asyncio.create_task(self._submit_later(request, grammar))
        return None

    def _submit_now(self, request: ScheduleRequest) -> Admission:
        """Submit a request; once it is accepted, keep its pixels for the next ones of its view."""
        admission = self._loop.submit(request)
        if admission.rejected is not None or not request.may_keep_images:
            return admission
        keys = [pixels_key(image) for image in request.images]
        for key, image in zip(keys, request.images, strict=True):
            assert image.pixels is not None, "requests are completed before"
            self._images.put(request.view, key, image.pixels)
        # Of many images, the last ones may have taken the place of the first.
        return replace(admission, keeps_images=all(self._images.has(request.view, key) for key in keys))

    def _with_pixels(self, request: ScheduleRequest) -> ScheduleRequest | None:
        """Return a request with the pixels of all of its images, or None if some are not kept for its view."""
        if all(image.pixels is not None for image in request.images):
            return request
        if not request.may_keep_images:
            return None
        images: list[RowImage] = []
        for image in request.images:
            pixels = image.pixels
            if pixels is None:
                pixels = self._images.get(request.view, pixels_key(image))
            if pixels is None:
                return None
            images.append(replace(image, pixels=pixels))
        return replace(request, images=tuple(images))

    def _hold(self, request: ScheduleRequest) -> None:
        """Take the room of a request that waits for its grammar, or raise QueueFullError."""
        subject, pixels = request.view.subject, pixel_bytes(request.images)
        self._room.take(subject)
        try:
            if pixels:
                self._image_room.take(subject, pixels)
        except PandoError:
            self._room.give_back(subject)
            raise
        self._held[request.request_id] = subject, pixels

    async def _submit_later(self, request: ScheduleRequest, grammar: Grammar) -> None:
        try:
            await self._loop.prepare(grammar)
            admission = self._submit_now(request)
        except PandoError as error:
            admission = Admission(request.request_id, len(request.token_ids), error.to_failure())
        except Exception as error:  # noqa: BLE001  (raised again by the task that answers)
            self._forget(request.request_id)
            self._answers.put_nowait(error)
            return
        self._answer_later(admission)

    def _answer_later(self, admission: Admission) -> None:
        self._forget(admission.request_id)
        self._answers.put_nowait([admission])
        self._end_if_done()

    def _forget(self, request_id: RequestId) -> None:
        del self._waiting[request_id]
        subject, pixels = self._held.pop(request_id)
        self._room.give_back(subject)
        if pixels:
            self._image_room.give_back(subject, pixels)

    def _abort(self, request_id: RequestId) -> None:
        task = self._waiting.get(request_id)
        if task is not None:
            # The task may not have started yet, so it cannot be relied on to answer.
            task.cancel()
            self._answer_later(Admission(request_id, 0, ABORTED))
        self._loop.abort(request_id)

    def _end_if_done(self) -> None:
        if self._has_all and not self._waiting:
            self._answers.put_nowait(None)


def _with_scope(request: ScheduleRequest) -> ScheduleRequest:
    """Return the request with its view as the scope of its grammar, overriding the sender's."""
    grammar, view = request.options.sampling.grammar, request.view
    if grammar is None:
        return request
    scoped = replace(grammar, scope=GrammarScope(view.tenant, view.subject.name, view.salt))
    sampling = replace(request.options.sampling, grammar=scoped)
    return replace(request, options=replace(request.options, sampling=sampling))
