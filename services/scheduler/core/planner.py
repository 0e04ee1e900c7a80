"""Builds step plans: decoding, prefill chunks, admission, and retraction when pages run out."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from common.steps import MicroBatch, PrefillChunk, RowOpen, StepPlan
from common.tracing import is_sampled
from common.types import StepId
from services.scheduler.core.batch_class import WATCHFUL_PART, BatchClass
from services.scheduler.core.cached_parts import cached_parts
from services.scheduler.core.drafts import Guess
from services.scheduler.core.fair_rows import FairRows, RowPreemption
from services.scheduler.core.in_flight_prefixes import InFlightPrefixes
from services.scheduler.core.milestones import MilestoneKind, Milestones
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.reservations import Reservations
from services.scheduler.core.row_changes import Granting
from services.scheduler.core.sequence import SequencePhase, Wait
from services.scheduler.core.step_limits import StepLimits
from services.scheduler.core.suspects import Suspects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from common.types import RowSlot
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.core.config import CoreConfig
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.queue import ClassQueues
    from services.scheduler.core.row_changes import Tenancy
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import Billing
    from services.scheduler.core.speculation import Speculation


# Tokens that a pass with drafts may sample after, however few rows there may be.
LEAST_SAMPLES = 64
# Pixels of the rows that a plan opens, unless it opens one row: messages to workers have at most 64 MiB.
MAX_PIXEL_BYTES = 48 * 1024 * 1024
# Number of waiting sequences whose mean length estimates that of all.
_SAMPLED_SEQUENCES = 64


class Planner:
    """Decides the content of each step plan.

    One token budget covers decode and prefill: every decoding sequence takes one token, partly prefilled sequences come
    next, then new ones as long as a row, pages and budget are left. A new sequence needs pages for its known tokens and
    one spare page for each running sequence, never for its max_tokens. If pages run out later, those that wait for
    prompts of other groups are taken; if there are none, one sequence is retracted: it gives its pages back and waits.
    It is the youngest of the lowest priority (`preemption.py`), or under fair shares one of the tenant with the most
    pages relative to its weight (`fair_rows.py`). Under strict priorities and fair shares, running sequences are also
    preempted for a waiting one. Sequences of batches run only while no other sequence waits or runs.
    """

    def __init__(  # noqa: PLR0913  (all that plans are made of)
        self,
        config: CoreConfig,
        rows: RowSlots,
        queue: ClassQueues,
        memory: KvMemory,
        tenancy: Tenancy,
        billing: Billing,
        speculation: Speculation,
    ) -> None:
        """Plan over state that the core owns."""
        self.milestones = Milestones()
        self._config = config
        self.limits = StepLimits(config.max_step_tokens, config.max_rows, config.least_step_tokens)
        self._reservations = Reservations(rows, queue, memory, billing)
        self.preemption: RowPreemption
        if billing.counters is None:
            self.preemption = Preemption(rows, queue, memory, self._reservations, config.max_preemptions)
        else:
            self.preemption = FairRows(rows, queue, memory, self._reservations, billing, billing.counters)
        self._rows = rows
        self._queue = queue
        self._memory = memory
        self._tenancy = tenancy
        self._billing = billing
        self._speculation = speculation
        self.suspects = Suspects(rows)
        self._next_step = 1
        # Of the newest plan.
        self._micro_batch = MicroBatch(rows.micro_batches - 1, rows.micro_batches)
        self.paused = False
        # Only requests that have started before may get rows.
        self.holds_new = False
        # No request may: the workers are about to sleep, or sleep.
        self.holds_all = False
        # Makes one session release its pin, if any has one; used only when nothing could run otherwise.
        self.yield_pin: Callable[[], bool] = lambda: False
        # The sequence that the last plan had no pages for.
        self._refused: Sequence | None = None
        self._batch_class = BatchClass(config.batch_pause_s)
        # Whether the plan is one of batches while another request is likely.
        self._is_watchful = False

    @property
    def next_step(self) -> StepId:
        """The id of the next plan."""
        return StepId(self._next_step)

    def plan(
        self, now: float, epoch: int, decode_step_s: float | None, *, idle: bool, overtakes: bool = False
    ) -> StepPlan | None:
        """Return the next plan, or None if there is nothing to do.

        `decode_step_s` is the measured duration of a decode step, if known. `idle` means that no plan is in flight, so
        that a plan is sent even if it carries bookkeeping only, and that rows may get drafts. `overtakes` means that
        the plans in flight are abandoned for this one, which closes all of their rows.
        """
        self._judge_classes(now)
        if not (idle or overtakes) and (self._is_watchful or self._holds_plans()):
            return None
        while True:
            plan, has_freed_pages = self._try_plan(now, epoch, decode_step_s, idle=idle)
            if not has_freed_pages:
                return plan

    def _try_plan(
        self, now: float, epoch: int, decode_step_s: float | None, *, idle: bool
    ) -> tuple[StepPlan | None, bool]:
        """Return the next plan, if any, and whether pages were freed instead, so that planning has to start over."""
        self._suspend_batches()
        first = self._make_room()
        self._memory.slide_windows(self._rows)
        prefilling = self._prefilling()
        jumped = self._rows.jump_tokens()
        before = self._rows.planned.copy()
        micro_batch = self._rows.next_micro_batch(self._micro_batch)
        decoding, grants = self._plan_decode(micro_batch)
        self._memory.images.begin_plan(delays_rows=len(decoding) > 0)
        guesses = self._draft(decoding, jumped, grants, now) if idle else {}
        drafted = sum(guess.token_ids.size for guess in guesses.values())
        # Rows planned to their limit decode further if passes before are left out.
        decoders = int(self._rows.decoding.sum()) if self._shortens else len(decoding)
        budget = self._prefill_budget(decoders + jumped + drafted)
        prefills: list[PrefillChunk] = []
        for sequence in prefilling:
            budget -= self._plan_chunk(sequence, budget, prefills, grants)
        self._encode_ahead(first)
        opens = self._admit(first, budget, now, prefills, grants)
        if self._may_admit:
            self._reservations.grant(self._candidates(None), self._refused, self._free_slots)
        if not (len(decoding) or prefills):
            if self._unstick(prefilling, now):
                return None, True
            if not (idle and (self._memory.has_changes or self._tenancy.has_changes or self._is_moving_pages(now))):
                return None, False
        # Every sequence that could start has started above, so a multi-step decode delays none of them.
        loads = self._memory.loads
        is_short = bool(prefills or guesses) or (loads is not None and loads.is_loading)
        is_short = is_short or self._memory.images.encodings.has_waiting
        steps = 1 if is_short or self._is_watchful else self._extend(decoding, self._most_steps(decode_step_s), grants)
        states = self._memory.states
        if states is not None:
            states.plan_decoding(self._rows, decoding, before)
        if self._refused is not None and self._billing.counters is not None:
            self._billing.charge_idle_rows(self._refused, self.next_step, self._idle_rows(self._refused), steps)
        closes, replacements = self._tenancy.take_changes()
        step_id = self.next_step
        self._next_step += 1
        self._micro_batch = micro_batch
        can_abandon = self._config.abandons_passes and 0 < self._rows.running == self._rows.batch_rows
        plan = StepPlan(
            step_id=step_id,
            epoch=epoch,
            closes=closes,
            opens=tuple(opens),
            replacements=replacements,
            grants=grants.grants(),
            prefills=tuple(prefills),
            steps=steps,
            transfers=loads.take_transfers(now) if loads is not None else (),
            jumps=self._rows.jumps(),
            saves=states.take_saves() if states is not None else (),
            adapters=self._tenancy.adapters.take_loads(),
            drafts=self._speculation.sent(step_id, guesses, now),
            can_abandon=can_abandon,
            can_shorten=len(decoding) > 0 and not (can_abandon or prefills or guesses) and self._shortens,
            micro_batch=micro_batch,
            dropped_outputs=self._memory.images.outputs.take_dropped(),
        )
        return plan, False

    @property
    def may_start(self) -> bool:
        """Whether waiting sequences may start with the next plan, as far as rows and the last plan tell."""
        return self._may_admit and self._refused is None

    @property
    def _shortens(self) -> bool:
        """Whether the workers may leave out passes that decode.

        Window pages are released, and states saved, where rows are expected to be, and rows that jump have no certain
        place.
        """
        has_own_places = self._memory.windows is None and self._memory.states is None and not self._rows.jumping
        return self._config.abandons_passes and has_own_places

    def put_back_all(self) -> None:
        """Return all running sequences to the queue; see `_put_back`."""
        self._put_back(self._rows.occupants())

    def _idle_rows(self, refused: Sequence) -> int:
        """Estimate how many waiting sequences of other subjects could run in the pages kept for a refused one."""
        queue = self._queue.served
        others = len(queue) - queue.census.of(refused.request.view.subject)
        if not (others and self._rows.running):
            return 0
        known = sum(
            len(sequence.token_ids) for sequence in islice(queue, _SAMPLED_SEQUENCES) if sequence is not refused
        )
        mean_pages = self._memory.pages_of(known // min(len(queue), _SAMPLED_SEQUENCES) + 1)
        return min(self._free_slots, others, self._memory.available_pages // mean_pages)

    def _judge_classes(self, now: float) -> None:
        """Determine whether batches may run, and how."""
        is_interactive = self._queue.must_batches_yield
        if is_interactive:
            self._batch_class.note_interactive(now)
        self._queue.holds_batches = self._batch_class.must_pause(now)
        self._is_watchful = not is_interactive and self._batch_class.is_watchful(now)

    def _suspend_batches(self) -> None:
        """Take the rows of batches back while an interactive sequence waits or runs."""
        if not self._rows.batch_rows or not self._queue.must_batches_yield:
            return
        self._put_back([sequence for sequence in self._rows.occupants() if sequence.is_batch])

    def _make_room(self) -> Sequence | None:
        """Preempt rows for a waiting sequence; return the sequence if it must be admitted before all others."""
        waiting = len(self._queue.served)
        if self.paused or self.holds_all or self.holds_new or not waiting or self.suspects.is_isolating:
            return None
        return self.preemption.make_room(
            self.limits.rows, lambda: InFlightPrefixes(self._rows, self._memory), self._retract
        )

    def _is_moving_pages(self, now: float) -> bool:
        """Whether the workers have transfers to start or to report as finished."""
        loads = self._memory.loads
        return loads is not None and loads.is_busy(now)

    def _prefill_budget(self, decoding: int) -> int:
        """Return the number of prompt tokens the next step may compute beside `decoding` tokens of decoding sequences.

        Every prompt token delays the decoding sequences, but a growing queue delays all requests: a step takes
        `mixed_step_share` of the waiting prompt tokens, if that is more than `mixed_step_tokens`.
        """
        most, least = self.limits.tokens - decoding, self._config.mixed_step_tokens
        # A smaller budget would never have room for tokens of an image that belong in one step.
        block = self._memory.images.block_ahead
        # Texts for an encoder are computed in one piece.
        if self._is_watchful and not self._config.is_encoder:
            return min(most, max(self.limits.tokens // WATCHFUL_PART, block, 1))
        if least is None or not decoding:
            return most
        least = max(least, block)
        begun = self._rows.occupied & ~self._rows.decoding
        waiting = int((self._rows.length - self._rows.planned)[begun].sum())
        waiting += self._queue.waiting_tokens(2 * most)
        return min(most, max(least, int(waiting * self._config.mixed_step_share)))

    def _prefilling(self) -> list[Sequence]:
        """Return the sequences whose prompt is not fully planned, oldest first."""
        rows = (self._rows.occupied & ~self._rows.decoding).nonzero()[0]
        if not len(rows):
            return []
        sequences = [sequence for row in rows if (sequence := self._rows.sequences[row]) is not None]
        return sorted(sequences, key=lambda sequence: sequence.handle)

    def _most_steps(self, decode_step_s: float | None) -> int:
        """Return the number of decode steps that fill `target_plan_s`; 1 while the step time is unmeasured."""
        if not decode_step_s:
            return 1
        return max(1, min(int(self._config.target_plan_s / decode_step_s), self._config.max_steps_per_plan))

    def _plan_decode(self, micro_batch: MicroBatch) -> tuple[NDArray[np.int64], Granting]:
        """Plan one token for each decoding row of a micro-batch and retract rows until there are pages for it.

        Return the rows and grants.
        """
        grants = Granting(self._rows, self._memory)
        while True:
            live = self._rows.live(micro_batch)
            if self._try_advance(live, 1, grants):
                return live, grants
            if self._reservations.take(self.preemption.reserved_victims()):
                continue
            if self._rows.running > 1 or not self.yield_pin():
                self._retract(self.preemption.victim(self._rows.occupants()))

    def _draft(self, live: NDArray[np.int64], jumped: int, grants: Granting, now: float) -> dict[RowSlot, Guess]:
        """Draft tokens for rows whose next token is planned, as far as there are pages for them."""
        drafts = {}
        for row, guess in self._speculation.propose(live, self._draft_room(live, jumped), now).items():
            planned, size = int(self._rows.planned[row]), guess.token_ids.size
            missing = self._memory.pages_of(planned + size) - int(self._rows.page_count[row])
            pages = self._memory.try_allocate(missing) if missing > 0 else None
            if pages is not None:
                grants.add(np.array([row]), np.array([missing]), pages)
            size = min(size, int(self._rows.page_count[row]) * self._config.page_size - planned)
            if size > 0:
                drafts[row] = Guess(guess.token_ids[:size], guess.origin)
                self._rows.reach[row] = max(self._rows.reach[row], planned + size)
        return drafts

    def _holds_plans(self) -> bool:
        live = self._rows.live()
        return self._speculation.holds_plans(live, self._draft_room(live, 0))

    def _draft_room(self, live: NDArray[np.int64], jumped: int) -> int:
        """Return the number of tokens that all drafts of a pass for the rows `live` may have."""
        # Logits are computed after each token of a draft, and memory is reserved for those of all rows.
        tokens = self.limits.tokens - self._config.vision.block
        return min(tokens - jumped, max(self.limits.rows, LEAST_SAMPLES)) - len(live)

    def _extend(self, live: NDArray[np.int64], steps: int, grants: Granting) -> int:
        """Extend a plan of one step to `steps` steps if pages allow; return the resulting number of steps."""
        if steps <= 1:
            return 1
        # More steps than any row has tokens left would only be cut short.
        left = int((self._rows.limit[live] - self._rows.planned[live]).max(initial=0))
        steps = min(steps, left + 1)
        if steps > 1 and self._try_advance(live, steps - 1, grants):
            return steps
        return 1

    def _try_advance(self, live: NDArray[np.int64], tokens: int, grants: Granting) -> bool:
        """Plan up to `tokens` more for each row, with pages for jump-forward tokens if there are enough."""
        slack = self._slack
        return self._try_reach(live, tokens, slack, grants) or (slack > 0 and self._try_reach(live, tokens, 0, grants))

    @property
    def _slack(self) -> int:
        """Jump-forward tokens allowed per row beyond the planned ones, such that those of all rows fit in one pass."""
        if not self._rows.jumping:
            return 0
        tokens = self.limits.tokens - self._config.vision.block
        return min(self._config.jump_tokens, max(tokens // self.limits.rows - 1, 0))

    def _try_reach(self, live: NDArray[np.int64], tokens: int, slack: int, grants: Granting) -> bool:
        """Plan up to `tokens` more tokens for each row, with pages for them; change nothing if there are too few pages.

        Rows with jump-forward get pages for `slack` more tokens, and always for the tokens that earlier plans allow.
        """
        planned = np.minimum(self._rows.planned[live] + tokens, self._rows.limit[live])
        target = self._rows.reach_of(live, planned, tokens, slack) if self._rows.jumping else planned
        missing = -(-target // self._config.page_size) - self._rows.page_count[live]
        short = (missing > 0).nonzero()[0]
        if len(short):
            counts = missing[short]
            pages = self._memory.try_allocate(int(counts.sum()))
            if pages is None:
                return False
            grants.add(live[short], counts, pages)
        self._rows.planned[live] = planned
        if self._rows.jumping:
            self._rows.reach[live] = target
        return True

    def _retract(self, sequence: Sequence) -> None:
        self._put_back([sequence])
        self._memory.count_retraction()

    def _put_back(self, sequences: list[Sequence]) -> None:
        """Return running sequences to the queue with their known tokens; their computed pages stay in the cache."""
        for sequence in sequences:
            assert sequence.row is not None, "only running sequences are put back"
            self._billing.leave(sequence, for_good=False)
            sequence.token_ids = self._rows.tokens(sequence.row).copy()
            sequence.phase = SequencePhase.WAITING
            sequence.retractions += 1
            self._tenancy.vacate(sequence)
            self.milestones.note(MilestoneKind.RETRACTED, sequence)
        self._queue.put_back(sequences)

    def _plan_chunk(self, sequence: Sequence, budget: int, prefills: list[PrefillChunk], grants: Granting) -> int:
        """Plan as much of a sequence's prompt as budget and pages allow.

        Return the planned tokens, with those that encoding images counts for.
        """
        row = sequence.row
        if budget <= 0 or row is None:
            return 0
        start, end = int(self._rows.planned[row]), int(self._rows.length[row])
        length = self._memory.images.cut(row, start, min(end - start, budget), budget)
        if self._memory.states is not None:
            length = self._memory.states.cut(row, start, length)
        held, room = int(self._rows.page_count[row]), self._memory.room
        if self._memory.pages_of(start + length) > held + room:
            length = self._memory.images.whole(row, start, (held + room) * self._config.page_size - start)
        if length <= 0:
            return 0
        missing = self._memory.pages_of(start + length) - held
        if missing > 0:
            pages = self._memory.try_allocate(missing)
            assert pages is not None, "what is available can be allocated"
            grants.add(np.array([row]), np.array([missing]), pages)
        prefills.append(PrefillChunk(row, start, length))
        encoded = self._memory.images.plan_chunk(row, start + length)
        self._billing.encode(sequence, encoded)
        if self._memory.states is not None:
            self._memory.states.plan_chunk(row, start + length)
        self._rows.planned[row] = start + length
        self._rows.decoding[row] = start + length == end
        if self._rows.jumping:
            self._rows.reach_within_pages(row, self._slack)
        return length + encoded

    def _admit(
        self, first: Sequence | None, budget: int, now: float, prefills: list[PrefillChunk], grants: Granting
    ) -> list[RowOpen]:
        """Admit waiting sequences while there is room, `first` before all others.

        Return the rows that the workers must open.
        """
        opens: list[RowOpen] = []
        self._refused = None
        self._tenancy.adapters.begin_plan()
        if budget <= 0 or not self._may_admit:
            return opens
        self._billing.settle()
        in_flight = InFlightPrefixes(self._rows, self._memory)
        held_back = pixels = 0
        for sequence in self._candidates(first):
            pixels += sequence.pixel_bytes
            if budget <= 0 or self._free_slots <= held_back or (opens and pixels > MAX_PIXEL_BYTES):
                break
            if self._config.is_encoder and len(sequence.token_ids) > budget:
                break
            if not self.suspects.may_start(sequence):
                continue
            blocked = self._blocked(sequence, in_flight)
            if blocked is not None:
                sequence.waits_for = blocked
                continue
            awaited = self._awaited(sequence, held_back, now)
            if awaited is not None:
                sequence.waits_for = awaited
                # Those that it waits for may come after it, and must not be kept from starting.
                held_back += sequence.fetch is None or not sequence.fetch.awaits_room
                continue
            lock = self._try_admit(sequence)
            if lock is None:
                sequence.waits_for = Wait.MEMORY
                self._refused = sequence
                self.preemption.note_refusal(sequence)
                break
            opens.append(self._open(sequence, lock, now))
            in_flight.add(sequence)
            budget -= self._plan_chunk(sequence, budget, prefills, grants)
        return opens

    def _try_admit(self, sequence: Sequence) -> PrefixLock | None:
        """Lock a sequence's cached prefix if there are pages for the rest, also reserved ones that others give up."""
        while True:
            lock = self._memory.try_admit(sequence, spare_pages=self._rows.running)
            if lock is not None or not self._reservations.take(self.preemption.reserved_victims(sequence)):
                return lock

    @property
    def _may_admit(self) -> bool:
        return not (self.paused or self.holds_all) and self._free_slots > 0 and len(self._queue.served) > 0

    def _blocked(self, sequence: Sequence, in_flight: InFlightPrefixes) -> Wait | None:
        """Return why a sequence has to wait for other requests before it can start; None if it does not."""
        if in_flight.is_awaited(sequence):
            return Wait.PREFIX
        adapter, tenant = sequence.adapter, sequence.request.view.tenant
        if adapter is not None and not self._tenancy.adapters.may_take(adapter.digest, tenant):
            return Wait.ADAPTER
        return None

    def _encode_ahead(self, first: Sequence | None) -> None:
        """Have images of the sequences that come next encoded, also if this step has no tokens left for them."""
        if not self._memory.images.encodings.has_room or not self._may_admit:
            return
        self._billing.settle()
        for sequence in islice(self._candidates(first), self._free_slots):
            if self.suspects.may_start(sequence) and not self._memory.may_load(sequence):
                self._billing.encode(sequence, self._memory.begin_encodings(sequence))

    def _awaited(self, sequence: Sequence, held_back: int, now: float) -> Wait | None:
        """Return why a sequence that could start has to wait for work outside the batch, and begin that work."""
        if self._memory.holds_back(sequence, self._rows.running, held_back, now):
            return Wait.LOAD
        self._billing.encode(sequence, self._memory.begin_encodings(sequence))
        return Wait.IMAGE if self._memory.awaits_images(sequence) else None

    def _candidates(self, first: Sequence | None) -> Iterator[Sequence]:
        if first is not None:
            yield first
        # The queue must not be read before `first` has left it.
        for sequence in self._queue.candidates(self._memory.match):
            if sequence is not first and (sequence.has_request_started or not self.holds_new):
                yield sequence

    @property
    def _free_slots(self) -> int:
        return min(self._rows.free_slots, self.limits.rows - self._rows.running)

    def _open(self, sequence: Sequence, lock: PrefixLock, now: float) -> RowOpen:
        self._queue.remove(sequence)
        row = self._rows.open(sequence, self.next_step, sequence.start_pages, sequence.start_tokens)
        sequence.phase = SequencePhase.PREFILL
        sequence.loads = 0
        self.suspects.start(sequence)
        if sequence.started_at is None:
            sequence.started_at = now
        if sequence.cached_tokens is None:
            found_tokens = lock.matched_tokens
            if sequence.remote is not None:
                found_tokens = min(found_tokens, sequence.remote.cached_tokens)
            sequence.cached_tokens = min(found_tokens, sequence.prompt_tokens)
            sequence.cached = cached_parts(sequence, lock, sequence.cached_tokens)
            self._billing.start(sequence, found_tokens)
        opened = self._row_open(sequence, row)
        sequence.tail = None
        return opened

    def _row_open(self, sequence: Sequence, row: RowSlot) -> RowOpen:
        """Return the message by which the workers learn of a row that was opened for a sequence."""
        request, adapter = sequence.request, sequence.adapter
        stop = request.options.stop
        stop_ids = stop.stop_token_ids
        # After a complete grammar match only the end can follow: with ignore_eos it is postponed as long as possible.
        is_postponed = stop.ignore_eos and sequence.sampling.grammar is not None
        postponed = self._config.eos_token_ids if is_postponed else ()
        if not stop.ignore_eos or is_postponed:
            stop_ids = (*stop_ids, *self._config.eos_token_ids)
        return RowOpen(
            row=row,
            request_id=request.request_id,
            token_ids=sequence.token_ids,
            prompt_tokens=sequence.prompt_tokens,
            computed_tokens=sequence.start_tokens,
            pages=sequence.start_pages,
            window_pages=self._memory.begin_window(sequence, self._rows),
            snapshot=self._memory.begin_states(sequence),
            sampling=sequence.sampling,
            max_total_tokens=sequence.max_total_tokens,
            stop_token_ids=stop_ids,
            min_new_tokens=stop.min_tokens,
            postponed_token_ids=postponed,
            prompt_logprobs=None if sequence.scoring is None else sequence.scoring.remaining,
            pooling=request.options.pooling,
            second_text_start=request.second_text_start,
            adapter=(None if adapter is None else self._tenancy.adapters.take(adapter.digest, request.view.tenant)),
            trace=request.options.trace if is_sampled(request.options.trace) else None,
            images=self._memory.begin_images(sequence),
        )

    def _unstick(self, prefilling: list[Sequence], now: float) -> bool:
        """Free pages if no sequence can make progress otherwise; return whether anything was freed.

        First, prompts that arrive from other groups give up their pages, then those that have arrived the pages beside
        the cache. Then, if several partly prefilled sequences
        hold all pages, one of them is retracted. If only one sequence runs, or none runs while one waits, a session's
        pin is released instead.
        """
        stuck = [sequence for sequence in prefilling if self._lacks_pages(sequence)]
        is_empty = self._refused is not None and not self._rows.running
        if (stuck or is_empty) and self._reservations.take(self.preemption.reserved_victims()):
            return True
        if (stuck or is_empty) and self._reservations.drop_tails():
            return True
        if len(stuck) > 1:
            self._retract(self.preemption.victim(stuck))
            return True
        is_alone = len(stuck) == 1
        return (is_alone or is_empty) and not self._is_moving_pages(now) and self.yield_pin()

    def _lacks_pages(self, sequence: Sequence) -> bool:
        """Whether there are too few pages for the shortest next chunk of a partly prefilled sequence."""
        row = sequence.row
        if row is None:
            return False
        start = int(self._rows.planned[row])
        pages = self._memory.pages_of(start + self._memory.images.least(row, start))
        return pages > int(self._rows.page_count[row]) + self._memory.room
