"""Relays requests from gateways to the scheduler, and admissions back.

A request is tracked here only from its arrival until its admission has been relayed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from common.errors import InvalidRequestError, PandoError, UnavailableError
from common.logs import get_logger
from common.tracing import is_recorded, record
from common.types import Admission, CacheMode, RequestFailure, ScheduleRequest
from services.tokenizer.images.pool import MissingImageError
from services.tokenizer.images.prompts import PlacedPrompt
from services.tokenizer.limits import allowed_context, check_prompt, check_request, param_of
from services.tokenizer.pooled_text import EncodedPair

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from common.requests import GenerateRequest, ImageFile, Prompt
    from common.room import SharedRoom
    from common.types import LoadReport, ReplyTo, RequestId, Subject, TokenIds
    from services.tokenizer.encoding import Encoded
    from services.tokenizer.images.prompts import ImagePrompts
    from services.tokenizer.limits import ModelLimits

RETRY_AFTER_MS = 1000
# Names of the prompt's field in errors.
PROMPT_NAMES = ("prompt", "messages")


class Scheduler(Protocol):
    """The destination of encoded requests."""

    def submit(self, requests: Sequence[ScheduleRequest]) -> None:
        """Send requests; raise UnavailableError if the scheduler is unavailable."""

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Abort requests, now or as soon as the scheduler is available again."""


class RequestPhase(Enum):
    """Progress of a request."""

    ENCODING = "encoding"
    ENCODED = "encoded"
    SENT = "sent"


class GatewaySession:
    """One gateway's stream, with the admissions that are not yet sent to it."""

    def __init__(self) -> None:
        self._admissions: list[Admission] = []
        self._owed = asyncio.Event()

    @property
    def owes(self) -> int:
        """Number of admissions that wait to be sent."""
        return len(self._admissions)

    def post(self, admission: Admission) -> None:
        """Add an admission."""
        self._admissions.append(admission)
        self._owed.set()

    def confirm(self) -> None:
        """Send what is pending, or an empty message, which shows the gateway that the stream is alive."""
        self._owed.set()

    async def take(self) -> Sequence[Admission]:
        """Wait for admissions and return all that are pending."""
        await self._owed.wait()
        self._owed.clear()
        taken, self._admissions = self._admissions, []
        return taken


@dataclass(slots=True, eq=False)
class _Pending:
    session: GatewaySession
    submission: Submission
    phase: RequestPhase = RequestPhase.ENCODING
    # For the admission, if the request asks for them.
    prompt_ids: tuple[int, ...] = ()
    keeps_images: bool = False
    # Prepares its images; cancelled when it is aborted, so that those which wait are not decoded.
    placing: asyncio.Task[PlacedPrompt] | None = None

    @property
    def request(self) -> GenerateRequest:
        return self.submission.request

    @property
    def subject(self) -> Subject:
        return self.request.view.subject

    @property
    def images(self) -> Sequence[ImageFile]:
        return self.request.image_files


class Relay:
    """Owns the requests that have not been admitted yet. All methods run on the event loop."""

    def __init__(
        self,
        limits: ModelLimits,
        scheduler: Scheduler,
        encode: Callable[[Subject, Sequence[Prompt], Sequence[bool | None]], Awaitable[Sequence[Encoded]]],
        room: SharedRoom,
        ban: Callable[[Subject, Sequence[str]], Awaitable[tuple[tuple[int, ...], ...]]],
        images: ImagePrompts,
    ) -> None:
        """Encode with `encode`, `ban` and `images`, which run off the event loop; send the results to `scheduler`.

        Each request occupies a place in `room`.
        """
        self._ban = ban
        self._images = images
        self._limits = limits
        self._scheduler = scheduler
        self._encode = encode
        self._room = room
        self._pending: dict[RequestId, _Pending] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("relay")

    @property
    def pending(self) -> int:
        """Number of requests that wait for their admission."""
        return len(self._pending)

    def is_pending(self, request_id: RequestId) -> bool:
        """Whether the request waits for its admission."""
        return request_id in self._pending

    def submit(self, session: GatewaySession, submissions: Sequence[Submission]) -> None:
        """Accept the requests of one message; each is eventually answered by one admission."""
        batches: dict[Subject, list[_Pending]] = {}
        # Texts do not wait until images are decoded, nor do other requests fail where a session's group is away.
        alone: list[tuple[Subject, list[_Pending]]] = []
        for submission in submissions:
            pending = self._try_accept(session, submission)
            if pending is None:
                continue
            if pending.images or pending.request.options.turn is not None:
                alone.append((pending.subject, [pending]))
            else:
                batches.setdefault(pending.subject, []).append(pending)
        for subject, batch in (*batches.items(), *alone):
            task = asyncio.create_task(self._process(subject, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def reject(self, session: GatewaySession, request_id: RequestId, error: PandoError) -> None:
        """Answer a request that could not be decoded."""
        session.post(Admission(request_id, 0, error.to_failure()))

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Abort requests by their exact ids, at any stage."""
        elsewhere = []
        for request_id in request_ids:
            pending = self._pending.get(request_id)
            if pending is not None and pending.phase is RequestPhase.ENCODING:
                # It never reaches the scheduler, because `_process` skips requests that are no longer pending.
                self._answer(Admission(request_id, 0, _aborted()))
            else:
                elsewhere.append(request_id)
        if elsewhere:
            self._scheduler.abort(elsewhere)

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        """Relay the scheduler's admissions to their gateways."""
        for admission in admissions:
            self._answer(admission)

    def on_load(self, load: LoadReport) -> None:
        """Ignore the load of a scheduler: there is no other one to choose."""

    def on_scheduler_lost(self, lost: Iterable[RequestId] | None = None) -> None:
        """Reject the unanswered requests of an unavailable scheduler, and abort them in case it received them.

        With several schedulers, `lost` are the requests sent to this one; None: all that were sent.
        """
        sent = [request_id for request_id, pending in self._pending.items() if pending.phase is RequestPhase.SENT]
        unanswered = sent if lost is None else sorted(set(sent).intersection(lost))
        error = UnavailableError("the scheduler went away; try again", retry_after_ms=RETRY_AFTER_MS)
        for request_id in unanswered:
            self._answer(Admission(request_id, 0, error.to_failure()))
        if unanswered:
            self._scheduler.abort(unanswered)

    def close(self, session: GatewaySession) -> None:
        """Remove a gateway whose stream ended, and abort its requests without a relayed admission."""
        mine = [request_id for request_id, pending in self._pending.items() if pending.session is session]
        sent = [request_id for request_id in mine if self._remove(request_id) is RequestPhase.SENT]
        if sent:
            self._scheduler.abort(sent)

    def _try_accept(self, session: GatewaySession, submission: Submission) -> _Pending | None:
        request = submission.request
        try:
            if request.request_id in self._pending:
                # No admission: the gateway would attribute it to the first request with this id.
                self._log.error("request.duplicate", request_id=request.request_id)
                return None
            check_request(request, self._limits)
            self._room.take(request.view.subject)
        except PandoError as error:
            self.reject(session, request.request_id, error)
            return None
        pending = _Pending(session, submission)
        self._pending[request.request_id] = pending
        return pending

    async def _process(self, subject: Subject, batch: Sequence[_Pending]) -> None:
        """Encode requests of one subject from one message; forward those that have not been aborted meanwhile."""
        started_at = time.time()
        try:
            requests = [pending.request for pending in batch]
            prompts = [request.prompt for request in requests]
            plain = await self._encode(subject, prompts, [request.add_special_tokens for request in requests])
            encoded = [await self._with_images(pending, ids) for pending, ids in zip(batch, plain, strict=True)]
            submissions = [await self._with_bans(pending.submission) for pending in batch]
            predictions = [await self._predicted(request) for request in requests]
        except Exception as error:  # noqa: BLE001  (the edge of the task: the gateway must get an answer)
            self._log.error("encoding.failed", exc_info=error)
            encoded = [PandoError("the prompt could not be encoded")] * len(batch)
            submissions = [pending.submission for pending in batch]
            predictions = [()] * len(batch)
        ended_at = time.time()
        ready = []
        for pending, submission, result, predicted in zip(batch, submissions, encoded, predictions, strict=True):
            pending.phase = RequestPhase.ENCODED
            _record(submission.request, started_at, ended_at, result)
            if self._pending.get(pending.request.request_id) is not pending:
                self._room.give_back(subject)
                continue  # aborted in the meantime
            scheduled = self._try_schedule(submission, result)
            if isinstance(scheduled, ScheduleRequest) and predicted:
                scheduled = replace(scheduled, prediction_ids=predicted)
            if isinstance(scheduled, ScheduleRequest) and submission.request.returns_prompt_ids:
                pending.prompt_ids = tuple(self._images.shown(scheduled.token_ids).tolist())
            pending.keeps_images = isinstance(result, PlacedPrompt) and result.are_kept
            if isinstance(scheduled, Admission):
                self._answer(scheduled)
            else:
                ready.append(scheduled)
        self._forward(ready)

    async def _with_images(self, pending: _Pending, encoded: Encoded) -> Encoded | PlacedPrompt:
        """Return a prompt with its images, or why one of them is refused."""
        if not pending.images or isinstance(encoded, PandoError | EncodedPair):
            return encoded
        if self._pending.get(pending.request.request_id) is not pending:
            return _aborted_error()
        request = pending.request
        view = None if request.options.cache_mode is CacheMode.NONE else request.view
        placed = self._images.place(pending.subject, encoded, pending.images, param_of(request.prompt), view)
        pending.placing = asyncio.create_task(placed)
        await asyncio.wait([pending.placing])
        if pending.placing.cancelled():
            return _aborted_error()
        error = pending.placing.exception()
        if isinstance(error, PandoError):
            return error
        return pending.placing.result()

    async def _with_bans(self, submission: Submission) -> Submission:
        """Return the request with the token sequences of its banned words."""
        request = submission.request
        if not request.bad_words:
            return submission
        sequences = await self._ban(request.view.subject, request.bad_words)
        sampling = replace(request.options.sampling, banned_sequences=sequences)
        return replace(submission, request=replace(request, options=replace(request.options, sampling=sampling)))

    async def _predicted(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the tokens of the text that a request predicts, no more than a context has."""
        if not request.prediction:
            return ()
        (ids,) = await self._encode(request.view.subject, [request.prediction], [False])
        if isinstance(ids, PandoError | EncodedPair):
            # It changes no output.
            return ()
        return tuple(ids[: self._limits.max_context_tokens].tolist())

    def _try_schedule(self, submission: Submission, encoded: Encoded | PlacedPrompt) -> ScheduleRequest | Admission:
        request = submission.request
        if isinstance(encoded, PandoError):
            lacks_images = isinstance(encoded, MissingImageError)
            return Admission(request.request_id, 0, encoded.to_failure(), lacks_images=lacks_images)
        second_start = encoded.second_start if isinstance(encoded, EncodedPair) else None
        images = encoded.images if isinstance(encoded, PlacedPrompt) else ()
        token_ids = encoded.token_ids if isinstance(encoded, EncodedPair | PlacedPrompt) else encoded
        try:
            if request.truncate_prompt_tokens is not None:
                token_ids = token_ids[-request.truncate_prompt_tokens :]
            check_prompt(token_ids, request, self._limits, has_images=bool(images))
        except PandoError as error:
            return Admission(request.request_id, len(token_ids), error.to_failure())
        scheduled = _scheduled(submission, token_ids, self._limits, second_start)
        return replace(scheduled, images=images) if images else scheduled

    def _forward(self, requests: Sequence[ScheduleRequest]) -> None:
        if not requests:
            return
        try:
            self._scheduler.submit(requests)
        except UnavailableError as error:
            for request in requests:
                self._answer(Admission(request.request_id, len(request.token_ids), error.to_failure()))
            return
        for request in requests:
            self._pending[request.request_id].phase = RequestPhase.SENT

    def _answer(self, admission: Admission) -> None:
        pending = self._pending.get(admission.request_id)
        if pending is not None:
            self._remove(admission.request_id)
            if admission.rejected is None and pending.prompt_ids:
                admission = replace(admission, prompt_ids=pending.prompt_ids)
            if admission.rejected is None and pending.keeps_images:
                admission = replace(admission, keeps_images=True)
            pending.session.post(_in_terms_of(pending.request, admission))

    def _remove(self, request_id: RequestId) -> RequestPhase:
        """Remove a request; return its phase. While it is being encoded, it keeps its place in the room."""
        pending = self._pending.pop(request_id)
        if pending.placing is not None:
            pending.placing.cancel()
        if pending.phase is not RequestPhase.ENCODING:
            self._room.give_back(pending.subject)
        return pending.phase


def _in_terms_of(request: GenerateRequest, admission: Admission) -> Admission:
    """Return the admission with the client's name for the prompt in its error."""
    failure = admission.rejected
    if failure is None or request.prompt_name is None or failure.param not in PROMPT_NAMES:
        return admission
    return replace(admission, rejected=replace(failure, param=request.prompt_name))


def _record(request: GenerateRequest, start: float, end: float, encoded: Encoded | PlacedPrompt) -> None:
    """Report the time that a request waited for a thread and was encoded; a batch is encoded as one."""
    if is_recorded(request.options.trace):
        ids = encoded.token_ids if isinstance(encoded, EncodedPair | PlacedPrompt) else encoded
        tokens = 0 if isinstance(ids, PandoError) else len(ids)
        record("tokenize", request.options.trace, start, end, {"gen_ai.usage.input_tokens": tokens})


def _aborted() -> RequestFailure:
    return _aborted_error().to_failure()


def _aborted_error() -> InvalidRequestError:
    return InvalidRequestError("the request was aborted before it was admitted")


def _scheduled(
    submission: Submission, token_ids: TokenIds, limits: ModelLimits, second_start: int | None
) -> ScheduleRequest:
    request, options = submission.request, submission.request.options
    if options.pooling is None and options.stop.max_tokens is None and options.max_context_tokens is not None:
        # The scheduler checks against the model's context only, not against the requester's smaller limit.
        max_tokens = allowed_context(options, limits) - len(token_ids)
        options = replace(options, stop=replace(options.stop, max_tokens=max_tokens))
    return ScheduleRequest(
        request.request_id,
        request.view,
        submission.reply_to,
        token_ids,
        options,
        routing_key=request.routing_key,
        second_text_start=second_start,
    )


@dataclass(frozen=True, slots=True)
class Submission:
    """A request, and the subscription that receives its output."""

    request: GenerateRequest
    reply_to: ReplyTo
