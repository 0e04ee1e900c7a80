"""All open generations of this process: their number is limited, and shutdown waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from structlog.contextvars import bind_contextvars

from common.errors import QueueFullError, RequestFailedError
from common.room import SharedRoom
from common.types import ErrorCode, RequestFailure, RequestId
from gateway.generation.generation import Generation
from gateway.generation.recent import RecentRequests
from gateway.generation.spans import record_request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.requests import GenerateRequest
    from common.types import Subject, View
    from gateway.generation.journal import Journal, JournalEntry, ResumePolicy
    from gateway.metrics import GatewayMetrics
    from gateway.pipeline.port import Pipeline

RETRY_AFTER_MS = 1000
# A request without any message for this long counts as lost; scheduler.waiting_timeout_s must be less.
SILENCE_LIMIT_S = 600.0
# One request may contain thousands of texts; submitted all at once, they would fill the scheduler's queue.
EMBEDDING_WINDOW = 256
# The suffix that `renamed` adds.
RENAMED = re.compile("~[0-9a-f]{8}$")
ABORTED = RequestFailure(ErrorCode.INVALID_REQUEST, "the request was aborted on demand")
SHUTDOWN = RequestFailure(
    ErrorCode.UNAVAILABLE, "this server is shutting down", retryable=True, retry_after_ms=RETRY_AFTER_MS
)


class Generations:
    """Opens and closes generations. While `draining` is set, new ones are refused and the open ones finish."""

    def __init__(
        self,
        pipeline: Pipeline,
        journal: Journal,
        policy: ResumePolicy,
        metrics: GatewayMetrics,
        *,
        max_open_requests: int,
        open_image_bytes: int,
    ) -> None:
        """At most `max_open_requests` prompts, with images of `open_image_bytes`, are open at a time."""
        self.draining = False
        self.recent = RecentRequests()
        self._pipeline = pipeline
        self._journal = journal
        self._policy = policy
        self._metrics = metrics
        self._room = SharedRoom(max_open_requests, "open", RETRY_AFTER_MS)
        self._image_room = SharedRoom(open_image_bytes, "open with images", RETRY_AFTER_MS)
        self._open: set[Generation] = set()
        # Each one's subject, prompts, and bytes of images.
        self._taken: dict[Generation, tuple[Subject, int, int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def open(
        self, entries: Sequence[JournalEntry], *, buffer_bytes: int | None = None, elapsed_s: float = 0.0
    ) -> Generation:
        """Submit the requests of `entries` (see `number_choices`); the caller must `close` the generation.

        Entries with output are continued after it; their first generation began `elapsed_s` ago.

        Raises:
            QueueFullError: too many requests are open.
            RequestFailedError: this process is shutting down.
        """
        if self.draining:
            raise RequestFailedError(SHUTDOWN)
        request = entries[0].request
        taken = self._take(request.view.subject, entries)
        window = EMBEDDING_WINDOW if request.options.pooling is not None else None
        generation = Generation(
            self._pipeline, entries, self._policy, self._metrics, buffer_bytes=buffer_bytes, window=window
        )
        for entry in entries:
            self._journal.open(entry)
        self._open.add(generation)
        self._taken[generation] = taken
        self._idle.clear()
        self._metrics.open_requests.set(len(self._journal))
        # Fields of the log event at the request's end.
        bind_contextvars(request_id=request.request_id, tenant=request.view.tenant, model=request.model)
        self.recent.add(_names(generation)[1], generation.record)
        generation.start(elapsed_s)
        return generation

    def _take(self, subject: Subject, entries: Sequence[JournalEntry]) -> tuple[Subject, int, int]:
        """Take the room of requests, or raise QueueFullError."""
        image_bytes = sum(image.size for entry in entries for image in entry.request.image_files)
        self._room.take(subject, len(entries))
        try:
            if image_bytes:
                self._image_room.take(subject, image_bytes)
        except QueueFullError:
            self._room.give_back(subject, len(entries))
            raise
        return subject, len(entries), image_bytes

    def close(self, generation: Generation, cause: str | None = None) -> None:
        """End `generation` if it has not ended, and remove it; an early end is counted under `cause`."""
        if generation not in self._open:
            return
        self._open.remove(generation)
        generation.close(cause)
        for entry in generation.entries:
            self._journal.close(entry.request.request_id)
        subject, prompts, image_bytes = self._taken.pop(generation)
        self._room.give_back(subject, prompts)
        if image_bytes:
            self._image_room.give_back(subject, image_bytes)
        self._metrics.open_requests.set(len(self._journal))
        if not self._open:
            self._idle.set()
        usage = generation.usage
        generation.record.ended_at, generation.record.usage = time.time(), usage
        record_request(generation.record, _names(generation)[1])
        model = generation.entries[0].request.model
        self._metrics.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(model).inc(usage.cached_tokens)
        bind_contextvars(**usage.counts())

    def abort(self, request_id: str | None, owner: Callable[[View], bool]) -> int:
        """Abort the requests that `owner` accepts and that are called exactly `request_id` (None: any name).

        The suffix of a request id that starts at its last dot makes it unique and is not part of its name. Returns the
        number of aborted requests.
        """
        found = [
            generation
            for generation in self._open
            if request_id in (None, *_names(generation)) and owner(generation.entries[0].request.view)
        ]
        for generation in found:
            generation.fail(ABORTED, "request")
        return len(found)

    async def watch_silence(self, limit_s: float = SILENCE_LIMIT_S, interval_s: float = 5.0) -> None:
        """Look periodically for requests that the pipeline has lost, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            for generation in list(self._open):
                # A line of a batch waits for any time while other requests run.
                if not generation.entries[0].request.options.is_batch:
                    generation.end_silence(limit_s)

    @property
    def open_requests(self) -> int:
        """Number of prompts that are being processed."""
        return len(self._journal)

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, wait up to `limit_s` for the open ones to end, then fail the rest."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        for generation in list(self._open):
            generation.fail(SHUTDOWN, "shutdown")


def renamed(request: GenerateRequest) -> GenerateRequest:
    """Return the request under a new id: its former one may still be known in the pipeline."""
    return replace(request, request_id=RequestId(f"{request.request_id}~{secrets.token_hex(4)}"))


def original_id(request: GenerateRequest) -> RequestId:
    """Return the id that a request had before `renamed`."""
    return RequestId(RENAMED.sub("", request.request_id))


def _names(generation: Generation) -> tuple[str, str]:
    """Return the complete id of a generation's first request, and the id that its client was given."""
    whole = original_id(generation.entries[0].request)
    return whole, whole.rpartition(".")[0] or whole.removesuffix("-0")
