"""Scheduler core: deterministic decisions over the queue, rows, pages and cache, without gRPC, torch or a clock."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from common.errors import (
    ContextLengthError,
    DeviceMemoryError,
    EngineFailureError,
    InvalidRequestError,
    ModelNotFoundError,
    PandoError,
    RequestTimeoutError,
)
from common.images import image_spans, runs_of
from common.limits import Limits
from common.prompt_limits import check_prompt_logprobs
from common.room import SharedRoom
from common.sampling import choice_seed
from common.types import Admission, Finish, FinishReason, Subject, pixel_bytes
from services.scheduler.cache.keys import adapter_tags, image_tags
from services.scheduler.core.adapter_slots import AdapterSlots
from services.scheduler.core.costs import LoadCosts
from services.scheduler.core.drafts import DraftSources
from services.scheduler.core.exports import Exports
from services.scheduler.core.free_room import free_tokens
from services.scheduler.core.memory import KvMemory
from services.scheduler.core.milestones import MilestoneKind
from services.scheduler.core.output import Output, OutputBuffer
from services.scheduler.core.planner import Planner
from services.scheduler.core.pooling import check_pooling, with_usable_cache
from services.scheduler.core.queue import RETRY_AFTER_MS, ClassQueues, QueueOrder
from services.scheduler.core.results import NO_MEMORY, ResultHandler
from services.scheduler.core.row_changes import Tenancy
from services.scheduler.core.rows import RowSlots
from services.scheduler.core.sequence import (
    PrefillFollower,
    PromptScoring,
    Sequence,
    SequenceAdapter,
    SequencePhase,
    Wait,
    initial_ids,
)
from services.scheduler.core.session import LacksSessionError
from services.scheduler.core.sessions import Sessions
from services.scheduler.core.shares import Billing
from services.scheduler.core.speculation import Speculation
from services.scheduler.core.suspects import PromptQuarantine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.grammars import Grammar
    from common.steps import StepPlan, StepResult
    from common.transfers import TransferAck
    from common.types import RequestId, ScheduleRequest
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.core.config import CoreConfig
    from services.scheduler.core.costs import OperationTimes
    from services.scheduler.core.speculation import GuessesTokens
    from services.scheduler.core.step_limits import StepLimits


QUARANTINED = (
    "this request repeatedly ended the engine that computed it, so it is not run again; other requests are not "
    "affected, and the same prompt is refused for some minutes"
)


class SchedulerCore:
    """Owns every open request from submission to finish.

    All calls must come from one thread. Times are seconds of one monotonic clock and are passed in.
    """

    def __init__(  # noqa: PLR0913  (all that decisions depend on)
        self,
        config: CoreConfig,
        allocator: PageAllocator,
        cache: PrefixCache,
        order: QueueOrder,
        times: OperationTimes | None = None,
        find_adapter: Callable[[str], str | None] = lambda _name: None,
        make_sources: Callable[[RowSlots, PrefixCache], GuessesTokens] = DraftSources,
    ) -> None:
        """Start empty, over an allocator and a cache that nothing else modifies.

        `order` is the order of the waiting queue; `times` measures the duration of cache operations; `find_adapter`
        returns the digest of the adapter of a name; `make_sources` returns the sources of drafts.
        """
        self.config = config
        self._limits = Limits()
        batches = order.batches or order
        counters = order.counters
        # Of interactive sequences, and of those of batches; None without fair shares.
        self.counters = counters, batches.counters
        self._counters = [each for each in {*self.counters} if each is not None]
        self.rows = RowSlots(config.max_rows, config.max_context + 1, config.page_size, config.micro_batches)
        retracted_first = counters is None and not config.strict_priority
        self.queue = ClassQueues(self.rows, order, batches, retracted_first=retracted_first)
        costs = LoadCosts(config.kv_bytes_per_token, config.prefill_tokens_per_s, config.load_bytes_per_s)
        self.memory = KvMemory(allocator, cache, costs, times, vision=config.vision, has_pages=not config.is_encoder)
        # In bytes of pixels.
        self._image_room = SharedRoom(config.vision.open_bytes, "open with images", RETRY_AFTER_MS)
        # Plans in flight, oldest first.
        self._in_flight: deque[StepPlan] = deque()
        # A sequence has come since the last plan.
        self._has_arrival = False
        # Seconds that the newest plan is expected to take; 0: not known, or it computes no prompts.
        self.expected_s = 0.0
        self.finished_steps = 0
        self.sessions = Sessions(self.memory, config.sessions, self._image_room)
        self.exports = Exports(self.memory)
        self.adapters = AdapterSlots(config.adapter_slots, config.adapter_share)
        self._find_adapter = find_adapter
        self._tenancy = Tenancy(self.rows, self.memory, self.adapters)
        self._output = OutputBuffer()
        self._billing = Billing(self.rows, counters, batches.counters)
        self.speculation = Speculation(config.draft_tokens, self.rows, make_sources(self.rows, cache), costs)
        self._planner = Planner(
            config, self.rows, self.queue, self.memory, self._tenancy, self._billing, self.speculation
        )
        self._suspects = self._planner.suspects
        self._quarantine = PromptQuarantine()
        self._planner.yield_pin = self.sessions.yield_pin
        # The caller takes them and notes the times.
        self.milestones = self._planner.milestones
        self._results = ResultHandler(self.rows, self._tenancy, self._output, self.milestones, self.speculation, costs)
        self._by_handle: dict[int, Sequence] = {}
        self._by_request: dict[RequestId, list[Sequence]] = {}
        self._next_handle = 1

    @property
    def planned_steps(self) -> int:
        """Number of plans made so far."""
        return self._planner.next_step - 1

    @property
    def preemptions(self) -> int:
        """Number of rows preempted for waiting requests of higher priority, or of subjects below their fair share."""
        return self._planner.preemption.count

    @property
    def jumped_tokens(self) -> int:
        """Number of tokens appended by jump-forward, without a forward pass of their own."""
        return self._results.jumped_tokens

    @property
    def limits(self) -> StepLimits:
        """The current limits on step size."""
        return self._planner.limits

    @property
    def is_paused(self) -> bool:
        """Whether admission of waiting sequences is paused."""
        return self._planner.paused

    @property
    def open_sequences(self) -> Iterable[Sequence]:
        """All sequences that have not finished, oldest first."""
        return self._by_handle.values()

    @property
    def free_tokens(self) -> int | None:
        """Tokens of KV for which there is room beside what open sequences need; None: this model keeps none."""
        if self.config.is_encoder:
            return None
        return free_tokens(self.memory, self.rows, self.queue)

    def adopt(self, limits: Limits) -> None:
        """Replace the limits that apply to cached and pinned pages, the waiting queue and charging."""
        self._limits = limits
        self.memory.cache.adopt(limits)
        self.sessions.adopt(limits)
        for counters in self._counters:
            counters.adopt(limits)

    def pause(self, *, paused: bool) -> None:
        """Pause or resume the admission of waiting sequences; running sequences continue."""
        self._planner.paused = paused

    def hold_new(self, *, held: bool) -> None:
        """Keep requests from starting, or let them; those that have started continue."""
        self._planner.holds_new = held

    def hold_all(self, *, held: bool, puts_back: bool = False) -> None:
        """Keep all requests from running, or let them. `puts_back`: those that run wait again, with their tokens."""
        self._planner.holds_all = held
        if puts_back:
            self._planner.put_back_all()

    @property
    def is_at_rest(self) -> bool:
        """Whether no row runs, no plan is in flight, and the workers know of all changes."""
        return not (self.rows.running or self.in_flight or self._tenancy.has_changes)

    def give_back_memory(self, *, keeps_host: bool) -> None:
        """Forget what the device holds, as the workers give its memory back; see `is_at_rest`.

        What is cached on the host tier stays if `keeps_host`; then no transfer may be open.
        """
        assert self.is_at_rest, "rows would lose their KV"
        self._tenancy.forget_all()
        self.sessions.lose_pins()
        self.exports.lose_all()
        if keeps_host:
            self.memory.leave_device()
        else:
            self.memory.forget_all()

    @property
    def started_sequences(self) -> list[Sequence]:
        """The open sequences of requests that have started."""
        return [sequence for sequence in self.open_sequences if sequence.has_request_started]

    def abort_started(self) -> None:
        """Abort all requests that have started."""
        for sequence in self.started_sequences:
            self._finish(sequence, Finish(FinishReason.ABORT))

    def submit(self, request: ScheduleRequest, now: float, follower: PrefillFollower | None = None) -> Admission:
        """Add a request to the queue, or return an admission with the reason for its refusal.

        With a `follower`, the request of one choice is computed for another group, and has no output.
        """
        request = with_usable_cache(request)
        own_tokens = len(request.token_ids)
        try:
            request = self.sessions.enter(request)
            self._check(request)
            check_pooling(request, self.config)
            adapter = self._adapter_of(request)
            if self._quarantine.holds(request, now):
                raise EngineFailureError(QUARANTINED)
            if request.images:
                self._image_room.take(request.view.subject, pixel_bytes(request.images))
        except PandoError as error:
            lacks_session = isinstance(error, LacksSessionError)
            return Admission(
                request.request_id, len(request.token_ids), error.to_failure(), lacks_session=lacks_session
            )
        self._suspects.enter(request)
        leader: Sequence | None = None
        sequences = []
        for index in range(request.options.n):
            sequence = self._new_sequence(request, index, leader, now)
            sequence.adapter, sequence.follower = adapter, follower
            leader = leader or sequence
            sequences.append(sequence)
            self._by_handle[sequence.handle] = sequence
            self.sessions.begin(sequence)
            self.queue.add(sequence)
            self._has_arrival = True
            self._output.open(sequence)
            self.milestones.note(MilestoneKind.ARRIVED, sequence)
        self._by_request[request.request_id] = sequences
        for sequence in sequences[:1]:
            if request.options.pooling is None and len(sequence.token_ids) >= sequence.max_total_tokens:
                # Resumed with no tokens left to generate.
                self._finish(sequence, Finish(FinishReason.LENGTH))
            else:
                self.memory.prefetch(sequence)
        conversation_ids = _prepended(request, len(request.token_ids) - own_tokens)
        return Admission(request.request_id, len(request.token_ids), conversation_ids=conversation_ids)

    def _check(self, request: ScheduleRequest) -> None:
        if request.request_id in self._by_request:
            raise InvalidRequestError(f"request id {request.request_id} is in use", param="request_id")
        options = request.options
        self.queue.check_room(request, self.config.max_waiting, self._limits)
        if options.resume is not None and options.n != 1:
            raise InvalidRequestError("a resumed request has exactly one choice", param="n")
        known = len(request.token_ids) + (len(options.resume.token_ids) if options.resume else 0)
        limit = self._context_of(request)
        if options.pooling is None and known >= limit:
            raise ContextLengthError(
                f"the prompt has {known} tokens, but at most {limit - 1} fit beside one token of output", param="prompt"
            )
        if options.prompt_logprobs is not None:
            check_prompt_logprobs(options.prompt_logprobs, len(request.token_ids))
            if request.images:
                message = "A prompt with images has no log probabilities of its own."
                raise InvalidRequestError(message, param="prompt_logprobs")
        ids = request.token_ids
        if (not request.images and int(ids.min()) < 0) or int(ids.max()) >= self.config.vocabulary_size:
            raise InvalidRequestError(f"token ids must be in [0, {self.config.vocabulary_size})", param="prompt")
        if request.images and not self.config.sees_images:
            raise InvalidRequestError("The model's workers have no encoder of images.", param="prompt")
        if any(image.pixels is None for image in request.images):
            raise InvalidRequestError("An image has no pixels.", param="prompt")
        image_spans(ids, request.images)
        block = self.config.vision.block
        if block and any(end - start != block for start, end in runs_of(np.flatnonzero(ids < 0))):
            raise InvalidRequestError(f"Images are runs of {block} tokens, with text between them.", param="prompt")

    def _adapter_of(self, request: ScheduleRequest) -> SequenceAdapter | None:
        name = request.options.adapter
        if not name:
            return None
        digest = self._find_adapter(name)
        if digest is None:
            raise ModelNotFoundError(f"The adapter '{name}' is not loaded here.", param="model")
        return SequenceAdapter(digest, adapter_tags(digest))

    def uses_adapter(self, digest: str) -> bool:
        """Return whether an open sequence uses an adapter, or the workers may still load it for a plan."""
        is_loaded = any(load.digest == digest for plan in self._in_flight for load in plan.adapters)
        return is_loaded or any(
            each.adapter is not None and each.adapter.digest == digest for each in self._by_handle.values()
        )

    def lose_adapter(self, digest: str, error: PandoError) -> None:
        """End the sequences that use an adapter which the workers do not have any more."""
        for sequence in list(self._by_handle.values()):
            if sequence.adapter is not None and sequence.adapter.digest == digest:
                self._finish(sequence, Finish(FinishReason.ERROR, error=error.to_failure()))

    def _new_sequence(self, request: ScheduleRequest, index: int, leader: Sequence | None, now: float) -> Sequence:
        options, limit = request.options, self._context_of(request)
        if options.pooling is not None:
            limit = len(request.token_ids)
        elif options.stop.max_tokens is not None:
            # A sequence always samples one token when its prefill completes, even if max_tokens is 0.
            limit = min(limit, len(request.token_ids) + max(options.stop.max_tokens, 1))
        handle = self._next_handle
        self._next_handle += 1
        sampling = dataclasses.replace(options.sampling, seed=choice_seed(options.sampling.seed, index))
        sequence = Sequence(request, index, handle, sampling, initial_ids(request), limit, now, leader)
        if request.images:
            sequence.image_spans = image_spans(request.token_ids, request.images)
            sequence.image_tags = image_tags(request.token_ids, request.images, self.config.page_size)
        if options.prompt_logprobs is not None and leader is None:
            sequence.scoring = PromptScoring(options.prompt_logprobs, request.token_ids)
        return sequence

    def _context_of(self, request: ScheduleRequest) -> int:
        """Return the maximum length of prompt and output together, in tokens."""
        limit = min(self.config.max_context, self.config.capacity_tokens)
        own = request.options.max_context_tokens
        return limit if own is None else min(limit, own)

    def leader_of(self, request_id: RequestId) -> Sequence | None:
        """Return the first open choice of a request, or None."""
        return next(iter(self._by_request.get(request_id, ())), None)

    def abort(self, request_id: RequestId) -> bool:
        """Abort a request by its exact id; return whether it was open."""
        sequences = list(self._by_request.get(request_id, ()))
        for sequence in sequences:
            self._finish(sequence, Finish(FinishReason.ABORT))
        return bool(sequences)

    def forget(self, subject: Subject, session: str | None = None) -> int:
        """Close one or all of a subject's sessions and drop their private cache entries.

        Return the number of freed pages.
        """
        self.sessions.forget(subject, session)
        return self.memory.forget(subject, session)

    def end_silently(self, handle: int, generated: int | None = None) -> None:
        """End a choice without output because the detokenizer has already ended it: stop text matched, or client gone.

        If only the first `generated` output tokens count, a session drops the rest.
        """
        sequence = self._by_handle.get(handle)
        if sequence is not None:
            self._leave(sequence)
        if generated is not None:
            self.sessions.trim(handle, generated)

    def fail_all(self, error: PandoError) -> None:
        """End every open sequence with an error that carries the engine failures which its request is suspected of."""
        for sequence in list(self._by_handle.values()):
            failures = self._suspects.failures_of(sequence.request.request_id)
            failure = dataclasses.replace(error.to_failure(), engine_failures=failures)
            self._finish(sequence, Finish(FinishReason.ERROR, error=failure))

    def expire(self, now: float) -> None:
        """End sequences that have waited or run for too long, and idle sessions."""
        self.sessions.expire(now)
        for sequence in list(self._by_handle.values()):
            message = self._overdue(sequence, now)
            if message:
                self._finish(sequence, Finish(FinishReason.ERROR, error=RequestTimeoutError(message).to_failure()))

    def expire_unstarted(self, since: float, now: float, timeout_s: float, error: PandoError) -> None:
        """End requests with an error that have waited for longer than `timeout_s`.

        Time counts from `since` at the earliest. Requests that have started, and those of batches, wait on.
        """
        for sequence in list(self._by_handle.values()):
            is_patient = sequence.is_batch or sequence.has_request_started
            if not is_patient and now - max(sequence.arrived_at, since) > timeout_s:
                self._finish(sequence, Finish(FinishReason.ERROR, error=error.to_failure()))

    def _overdue(self, sequence: Sequence, now: float) -> str | None:
        age = now - sequence.arrived_at
        timeout_ms = sequence.request.options.timeout_ms
        if timeout_ms is not None and age * 1000 > timeout_ms:
            return f"the request's own limit of {timeout_ms} ms passed"
        if sequence.is_batch:
            # It may wait for any time; the gateway ends it when the batch's own time is over.
            return None
        if sequence.started_at is None:
            limit = self.config.waiting_timeout_s
            return f"the request waited for longer than {limit:g} s" if age > limit else None
        limit = self.config.running_timeout_s
        return f"the request ran for longer than {limit:g} s" if now - sequence.started_at > limit else None

    @property
    def in_flight(self) -> int:
        """Number of plans whose last result has not been applied."""
        return len(self._in_flight)

    @property
    def overtakes(self) -> bool:
        """Whether all plans in flight are abandoned for the next one, as an interactive sequence waits."""
        abandoned = bool(self._in_flight) and all(plan.can_abandon for plan in self._in_flight)
        return abandoned and self.queue.must_batches_yield

    @property
    def can_overtake(self) -> bool:
        """Whether the next plan need not wait for those in flight: workers abandon them, or leave out what they can.

        The latter is tried once for each arrival, with one plan more than usual, as the sequence may have to wait for
        something else.
        """
        if not self._has_arrival or self.in_flight != self.config.plans_in_flight:
            return self.overtakes
        return self.overtakes or (self._in_flight[-1].can_shorten and self._planner.may_start)

    def plan(self, now: float, epoch: int) -> StepPlan | None:
        """Return the next plan to send, or None if there is nothing to do now."""
        plan = self._planner.plan(
            now, epoch, self._results.decode_step_s, idle=self.in_flight == 0, overtakes=self.overtakes
        )
        self._has_arrival = False
        if plan is not None:
            self._in_flight.append(plan)
            self.expected_s = self._results.expect(plan, encodes=self.memory.images.planned > 0)
            for opened in plan.opens:
                sequence = self.rows.sequences[opened.row]
                assert sequence is not None, "the plan has just opened it"
                self.milestones.note_start(sequence)
                if not sequence.retractions:
                    self._output.start(sequence)
        return plan

    def apply(self, result: StepResult) -> None:
        """Apply the result of one forward pass."""
        self._results.apply(result, self._finish)
        if not result.partial:
            self._suspects.note_pass()
            self._billing.note_pass(result)
        if result.last:
            self._in_flight.popleft()
            self.finished_steps += 1

    def finish_transfer(self, ack: TransferAck, now: float) -> None:
        """Record that all ranks have finished a transfer."""
        assert self.memory.loads is not None, "only a host tier has transfers"
        self.memory.loads.finish(ack, now)

    def take_output(self) -> Output | None:
        """Return the pending output for the detokenizer, or None if there is none."""
        return self._output.take()

    def requeue_all(self) -> None:
        """Requeue every running sequence with its known tokens, after the workers and all KV were lost.

        Call `judge_loss` before the next plan.
        """
        self._suspects.lose(self.rows.occupants())
        for sequence in sorted(self.rows.occupants(), key=lambda sequence: sequence.handle):
            assert sequence.row is not None, "occupants have a row"
            self._billing.leave(sequence, for_good=False)
            sequence.token_ids = self.rows.tokens(sequence.row).copy()
            sequence.phase = SequencePhase.WAITING
            self.memory.free(sequence, self.rows)
            self.rows.close(sequence.row)
            self.queue.put_back([sequence])
            self.milestones.note(MilestoneKind.RETRACTED, sequence)
        self._tenancy.forget_all()
        self._results.forget_all()
        self._billing.lose_plans()
        self.sessions.lose_pins()
        self.exports.lose_all()
        self.memory.forget_all()
        for sequence in self.queue:
            self.memory.prefetch(sequence)
        self._in_flight.clear()

    def hold_grammars(self) -> set[Grammar]:
        """Hold back all sequences with grammars, of which none runs, and return these; see `release_grammar`."""
        grammars = set()
        for sequence in self._by_handle.values():
            if sequence.sampling.grammar is not None:
                assert sequence.row is None, "held back before they start"
                sequence.awaits_grammar = True
                sequence.waits_for = Wait.GRAMMAR
                grammars.add(sequence.sampling.grammar)
        return grammars

    def release_grammar(self, grammar: Grammar, error: PandoError | None = None) -> None:
        """Let the sequences start that are held back for a grammar, or end them with an error."""
        for sequence in list(self._by_handle.values()):
            if sequence.awaits_grammar and sequence.sampling.grammar == grammar:
                sequence.awaits_grammar = False
                if error is not None:
                    self._finish(sequence, Finish(FinishReason.ERROR, error=error.to_failure()))

    def judge_loss(self, now: float, *, engine_failed: bool) -> list[Sequence]:
        """Say whether the engine failed when the workers were lost; end and return the sequences to blame for it."""
        sequences = [
            sequence
            for request_id in self._suspects.judge(engine_failed=engine_failed)
            for sequence in self._by_request[request_id]
        ]
        for sequence in sequences:
            self._quarantine.add(sequence.request, now)
            self._finish(sequence, Finish(FinishReason.ERROR, error=EngineFailureError(QUARANTINED).to_failure()))
        return sequences

    def shrink_steps(self) -> bool:
        """Plan smaller steps from now on because device memory did not suffice; call this before `requeue_all`.

        If steps cannot shrink further, all running sequences end with an error, as they would only fail again.

        Returns:
            Whether the steps could shrink.
        """
        if self._planner.limits.try_shrink():
            return True
        for sequence in self.rows.occupants():
            self._finish(sequence, Finish(FinishReason.ERROR, error=DeviceMemoryError(NO_MEMORY).to_failure()))
        return False

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        self._leave(sequence, finish)
        self._output.finish(sequence, finish)

    def _leave(self, sequence: Sequence, finish: Finish | None = None) -> None:
        """Remove a sequence from the queue or from its row; its computed pages stay in the cache."""
        token_ids, row, computed = sequence.token_ids, sequence.row, 0
        known = len(token_ids) if row is None else int(self.rows.length[row])
        self.milestones.note_end(sequence, finish, max(known - sequence.prompt_tokens, 0))
        if row is None:
            self.queue.remove(sequence)
            self._billing.give_up(sequence)
            self.memory.leave_queue(sequence)
        else:
            if sequence.session is not None:
                computed = int(self.rows.computed[row])
                token_ids = self.rows.tokens(row).copy()
            self._billing.leave(sequence, for_good=True)
            self._tenancy.vacate(sequence)
        siblings = self._by_request[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.request_id]
            if sequence.request.images:
                self._image_room.give_back(sequence.request.view.subject, sequence.pixel_bytes)
        self.sessions.end(sequence, token_ids, computed, was_running=row is not None)
        sequence.phase = SequencePhase.FINISHED
        if sequence.follower is not None:
            sequence.follower.on_ended(finish)
        self._suspects.forget(sequence)
        del self._by_handle[sequence.handle]


def _prepended(request: ScheduleRequest, tokens: int) -> tuple[int, ...]:
    """Return the first `tokens` tokens of a prompt, which its session has prepended; none if they include images."""
    has_images = any(image.offset < tokens for image in request.images)
    return () if has_images else tuple(request.token_ids[:tokens].tolist())
