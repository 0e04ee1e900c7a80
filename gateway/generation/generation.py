"""One HTTP request's way through the pipeline: submission, updates, resumption after failures, abort."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import RequestFailedError
from common.logs import get_logger
from common.requests import ChatPrompt
from common.types import ErrorCode, Finish, FinishReason, RequestFailure, RequestId
from gateway.generation.journal import DeltaRelation
from gateway.generation.recent import RecentRequest
from gateway.generation.usage import Usage, usage_of
from gateway.metrics import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from common.deltas import Delta
    from common.requests import GenerateRequest
    from common.types import Admission
    from gateway.generation.journal import ChoiceRecord, ChoiceUpdate, JournalEntry, ResumePolicy
    from gateway.metrics import GatewayMetrics
    from gateway.pipeline.port import Pipeline

# Rough memory of a waiting update in addition to its text, and of one log probability entry.
UPDATE_BYTES = 200
LOGPROB_BYTES = 400
STUCK = RequestFailure(ErrorCode.TIMEOUT, "the client does not read its stream")
MISFIT = RequestFailure(ErrorCode.UNAVAILABLE, "tokens were lost on the way", retryable=True)
# Log probabilities of prompts that one response may contain: some 15 MB of JSON, rendered in half a second. The
# tokenizer limits them per prompt.
MAX_PROMPT_VALUES = 524_288
SILENT = RequestFailure(ErrorCode.UNAVAILABLE, "nothing was heard of the request for too long", retryable=True)


@dataclass(slots=True)
class _Route:
    """One open submission and those of its choices that have neither ended nor been resubmitted."""

    entry: JournalEntry
    choices: dict[int, ChoiceRecord]
    heard_at: float
    admitted: bool = False


class Generation:
    """The choices of one HTTP request while they are generated: listens to the pipeline, and has one reader.

    `close` is idempotent and aborts every submission that is still open.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        entries: Sequence[JournalEntry],
        policy: ResumePolicy,
        metrics: GatewayMetrics,
        *,
        buffer_bytes: int | None = None,
        window: int | None = None,
    ) -> None:
        """Prepare the generation of `entries`; at most about `buffer_bytes` of updates wait for the reader.

        At most `window` prompts are submitted at the same time; None submits all of them. Entries may have output of an
        earlier generation, which is continued.
        """
        self.entries = entries
        self._window = len(entries) if window is None else window
        self._unsent = deque(entry for entry in entries if not entry.has_output)
        # Called once if more than `buffer_bytes` wait for the reader; by then the generation has failed.
        self.on_overflow: Callable[[], None] = lambda: None
        self._pipeline = pipeline
        self._policy = policy
        self._metrics = metrics
        self._pace = Pace(metrics, entries[0].request, asyncio.get_running_loop().time)
        self._outbox = Outbox(buffer_bytes)
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._routes: dict[RequestId, _Route] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._unfinished = sum(not choice.is_finished for entry in entries for choice in entry.choices)
        self._resubmissions = 0
        self._prompt_values = 0
        # How often something about the choices has been heard of the pipeline.
        self.changes = 0
        first = entries[0].request
        self.record = RecentRequest(first.view, first.model, _operation(first), first.options.trace)
        # Once set, no updates are accepted, and nothing is submitted or put into the outbox.
        self._over = False
        self._log = get_logger("generation")

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return usage_of(self.entries)

    def start(self, elapsed_s: float = 0.0) -> None:
        """Submit all prompts, or the first `window` of them; each of the others follows when a choice has ended.

        The requests' time began `elapsed_s` ago, with an earlier generation.
        """
        self._opened_at -= elapsed_s
        for entry in self.entries:
            if entry.has_output:
                for choice in entry.choices:
                    if not choice.is_finished:
                        self._resubmit(entry, choice)
        for _ in range(self._window):
            self._submit_next()
        if not self._unfinished:
            self._outbox.end()

    async def next_updates(self) -> Sequence[ChoiceUpdate] | None:
        """Wait for updates and return all that are pending; empty once every choice has ended, None after a nudge.

        Raises:
            RequestFailedError: the request failed, and all updates before the failure have been returned.
        """
        return await self._outbox.take()

    def nudge(self) -> None:
        """Wake the reader without an update."""
        self._outbox.nudge()

    def close(self, cause: str | None = None) -> None:
        """Stop; abort every choice that still runs, counted in the metrics under `cause`."""
        if self._over:
            return
        if self._unfinished and cause:
            self._metrics.aborts.labels(cause).inc()
        self._end(None)

    def fail(self, failure: RequestFailure, cause: str | None = None) -> None:
        """Fail the generation with an error for the client, unless it has ended; metrics count it under `cause`."""
        if self._over or not self._unfinished:
            return
        if cause:
            self._metrics.aborts.labels(cause).inc()
        self._end(failure)

    # --- callbacks of the pipeline (gateway.pipeline.port.Listener) ---

    def on_admission(self, admission: Admission) -> None:
        """Record an acceptance; treat a rejection as a failure of all choices of that submission."""
        route = self._routes.get(admission.request_id)
        if route is None:
            return
        if admission.rejected is not None:
            del self._routes[admission.request_id]
            self._interrupt(route, route.choices.values(), admission.rejected)
            return
        self._note_admission(route)
        self.changes += 1
        route.entry.prompt_ids = route.entry.prompt_ids or admission.prompt_ids
        if admission.conversation_ids:
            # A turn of a session has one choice.
            route.entry.choices[0].conversation_ids = array("I", admission.conversation_ids)
        # The scheduler may count the tokens generated before as the prompt of a resumed submission.
        if not route.entry.prompt_tokens:
            route.entry.prompt_tokens = admission.prompt_tokens
            self._count_values(route.entry)

    def on_delta(self, delta: Delta) -> None:
        """Pass on new tokens; after a failure that may be temporary, schedule a resubmission."""
        route = self._routes.get(delta.request_id)
        choice = route.choices.get(delta.choice_index) if route else None
        if route is None or choice is None:
            return
        self._note_admission(route)
        match choice.judge(delta):
            case DeltaRelation.DUPLICATE:
                return
            case DeltaRelation.MISFIT:
                self._log.error("generation.misfit", request_id=delta.request_id, first_token=delta.first_token_index)
                self._give_up(delta.request_id, MISFIT)
                return
            case DeltaRelation.FRESH:
                self.changes += 1
        if delta.prompt_usage is not None:
            route.entry.note_usage(choice, delta.prompt_usage)
        if delta.finish is not None:
            del route.choices[delta.choice_index]
            if not route.choices:
                del self._routes[delta.request_id]
        failure = _failure_of(delta.finish)
        if failure is None:
            self._pass_on(route.entry.with_prompt_ids(choice.apply(delta)))
        else:
            self._interrupt(route, (choice,), failure)

    def on_lost(self, request_id: RequestId, failure: RequestFailure) -> None:
        """Resubmit all unfinished choices of a submission that will send no more updates."""
        route = self._routes.pop(request_id, None)
        if route is None:
            return
        self._interrupt(route, route.choices.values(), failure)

    def end_silence(self, limit_s: float) -> None:
        """Treat submissions without a message for `limit_s` as lost: the service that held them may have ended."""
        now = self._loop.time()
        silent = [request_id for request_id, route in self._routes.items() if now - route.heard_at > limit_s]
        for request_id in silent:
            self._log.error("generation.silent", request_id=request_id, seconds=limit_s)
            self._give_up(request_id, SILENT)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _pass_on(self, update: ChoiceUpdate) -> None:
        self._pace.note(update.index, update.tokens)
        if update.tokens:
            self.record.note_tokens()
        self._outbox.put(update)
        if update.finish is not None:
            self._unfinished -= 1
            self._submit_next()
        if not self._unfinished:
            self._outbox.end()
        elif self._outbox.is_over_limit:
            self._outbox.clear()
            self.fail(STUCK, "slow_client")
            self.on_overflow()

    def _submit_next(self) -> None:
        if self._unsent:
            entry = self._unsent.popleft()
            choices = {choice.number: choice for choice in entry.choices}
            self._routes[entry.request.request_id] = _Route(entry, choices, self._loop.time())
            self.record.submit(entry.request.request_id)
            self._pipeline.submit(entry.request, self)

    def _give_up(self, request_id: RequestId, failure: RequestFailure) -> None:
        self._pipeline.abort(request_id)
        self.on_lost(request_id, failure)

    def _note_admission(self, route: _Route) -> None:
        route.heard_at = self._loop.time()
        if not route.admitted:
            route.admitted = True
            for choice in route.choices.values():
                choice.was_admitted = True

    def _count_values(self, entry: JournalEntry) -> None:
        """Fail the response if its prompts' log probabilities, counted from their lengths, exceed the limit."""
        self._prompt_values += entry.prompt_values
        if self._prompt_values > MAX_PROMPT_VALUES:
            message = (
                f"The prompts of a request can have at most {MAX_PROMPT_VALUES} log probabilities, counted for each "
                "choice that shows them: send fewer prompts at once, or ask for fewer alternatives "
                "('logprobs' with 'echo', 'prompt_logprobs', 'top_logprobs_num')."
            )
            self.fail(RequestFailure(ErrorCode.INVALID_REQUEST, message, param="prompt_logprobs"))

    def _interrupt(self, route: _Route, choices: Iterable[ChoiceRecord], failure: RequestFailure) -> None:
        now = self._loop.time()
        for choice in choices:
            if self._over:
                return
            choice.failures += route.admitted
            choice.engine_failures = max(choice.engine_failures, failure.engine_failures)
            delay = self._policy.delay(choice, failure, now)
            if delay is None:
                self.fail(failure)
                return
            if choice.interrupted_at is None:
                choice.interrupted_at = now
                where = {"request_id": route.entry.request.request_id, "choice": choice.number}
                self._log.warning("generation.interrupted", **where, reason=failure.message)
            choice.tries += 1
            self._timers[choice.index] = self._loop.call_later(delay, self._resubmit, route.entry, choice)

    def _resubmit(self, entry: JournalEntry, choice: ChoiceRecord) -> None:
        self._timers.pop(choice.index, None)
        if choice.is_exhausted:
            self._pass_on(choice.end_at_limit())
            return
        self._resubmissions += 1
        request_id = RequestId(f"{entry.request.request_id}.{choice.number}.{self._resubmissions}")
        self._log.debug("generation.resumed", request_id=request_id, tokens=len(choice.token_ids), tries=choice.tries)
        self._metrics.resumptions.labels(entry.request.model).inc()
        self._routes[request_id] = _Route(entry, {0: choice}, self._loop.time())
        self.record.submit(request_id, again=True)
        elapsed_ms = round((self._loop.time() - self._opened_at) * 1000)
        self._pipeline.submit(choice.continuation(request_id, elapsed_ms), self)

    def _end(self, failure: RequestFailure | None) -> None:
        self._over = True
        self.record.failure = None if failure is None else failure.code
        self.record.was_cut_short = self._unfinished > 0
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        routes, self._routes = self._routes, {}
        for request_id in routes:
            self._pipeline.abort(request_id)
        self._outbox.end(failure)


def _operation(request: GenerateRequest) -> str:
    if request.options.pooling is not None:
        return "embeddings"
    return "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"


def _failure_of(finish: Finish | None) -> RequestFailure | None:
    """Return the failure that `finish` stands for, if any; an abort by an operator is a failure, too."""
    if finish is None:
        return None
    if finish.reason is FinishReason.ERROR:
        return finish.error or RequestFailure(ErrorCode.INTERNAL, "the request failed without a cause")
    if finish.reason is FinishReason.ABORT:
        return RequestFailure(ErrorCode.UNAVAILABLE, "the request was aborted by an operator", retryable=False)
    return None


class Outbox:
    """Connects the pipeline, which puts updates at any time, with the one reader that takes them."""

    def __init__(self, limit_bytes: int | None) -> None:
        """`limit_bytes` None sets no limit."""
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._updates: list[ChoiceUpdate] = []
        self._ended = False
        self._is_nudged = False
        self._failure: RequestFailure | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over_limit(self) -> bool:
        """Whether more bytes wait for the reader than the limit allows."""
        return self._limit_bytes is not None and self._bytes > self._limit_bytes

    def put(self, update: ChoiceUpdate) -> None:
        self._updates.append(update)
        self._bytes += UPDATE_BYTES + len(update.text) + LOGPROB_BYTES * len(update.logprobs)
        if update.prompt_logprobs is not None:
            self._bytes += LOGPROB_BYTES * len(update.prompt_logprobs.entries)
        self._wake()

    def end(self, failure: RequestFailure | None = None) -> None:
        """Mark the end of updates, with the failure that caused it, if any."""
        self._ended = True
        self._failure = failure
        self._wake()

    def clear(self) -> None:
        """Drop all waiting updates."""
        self._updates.clear()
        self._bytes = 0

    def nudge(self) -> None:
        """Wake the reader even if there is no update."""
        self._is_nudged = True
        self._wake()

    async def take(self) -> Sequence[ChoiceUpdate] | None:
        """Wait for updates and return all that are pending; empty at the end, None after a nudge.

        Raises:
            RequestFailedError: the outbox ended with a failure, and all updates before it have been taken.
        """
        while not self._updates:
            if self._failure is not None:
                raise RequestFailedError(self._failure)
            if self._ended:
                return ()
            if self._is_nudged:
                self._is_nudged = False
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        updates, self._updates, self._bytes = self._updates, [], 0
        return updates

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
