"""Service received by tenants and their subjects: virtual token counters (Sheng et al., OSDI 2024) on two levels."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from common.limits import Limits, ShareWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.limits import TenantLimits
    from common.steps import StepResult
    from common.types import RequestOptions, StepId, Subject
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence

# A heap is rebuilt when its length exceeds twice the number of live entries by more than this.
_SPARE_ENTRIES = 32


@dataclass(frozen=True, slots=True)
class ShareConfig:
    """Weights and limits of the service counters."""

    # The paper's ratio: a generated token takes a pass of its own, while the tokens of a prompt share one.
    output_weight: float = 2.0
    # Maximum number of counters kept for idle tenants, and per tenant for its idle subjects: 10,000 take about 4 MB.
    remembered: int = 10_000


@dataclass(slots=True, eq=False, repr=False)
class _Share:
    """One counter. `entry` numbers its valid entry in the one heap that it is in, the waiting or the idle one."""

    name: str
    counter: float
    waiting: int = 0
    entry: int = 0


class _Level:
    """Counters of parties that share one resource: the tenants, or the subjects of one tenant.

    A party that starts to wait is raised to the lowest counter among the waiting ones, so idle time earns no credit. A
    higher counter of an idle party is kept until the others have caught up. All calls take amortised O(log n) for n
    waiting or remembered parties.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        # Initial value of new counters; it never decreases.
        self._floor = 0.0
        self._shares: dict[str, _Share] = {}
        self._waiting: list[tuple[float, int, _Share]] = []
        self._idle: list[tuple[float, int, _Share]] = []
        self._waiting_shares = 0
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._shares)

    def counter(self, name: str) -> float:
        share = self._shares.get(name)
        return self._floor if share is None else share.counter

    def enter(self, name: str) -> None:
        share = self._share(name)
        if not share.waiting:
            self._raise_floor()
            share.counter = max(share.counter, self._floor)
            self._waiting_shares += 1
            self._push(self._waiting, share)
        share.waiting += 1

    def exit(self, name: str) -> list[str]:
        """Count one waiting request less; return the names of the counters that were dropped."""
        share = self._shares[name]
        share.waiting -= 1
        if share.waiting:
            return []
        self._waiting_shares -= 1
        if not self._waiting_shares:
            # No other party lacked the service that the last one received, so there is nothing to make up for.
            self._floor = max(self._floor, share.counter)
        self._push(self._idle, share)
        self._raise_floor()
        return self._forget()

    def charge(self, name: str, amount: float) -> list[str]:
        """Add to a counter; return the names of the counters that were dropped."""
        share = self._share(name)
        share.counter += amount
        if not share.waiting:
            self._push(self._idle, share)
            return self._forget()
        if amount < 0:
            # Heap entries are corrected lazily for counters that have grown, but not for one that has fallen.
            self._push(self._waiting, share)
        return []

    @property
    def waiting(self) -> int:
        """Number of parties that wait."""
        return self._waiting_shares

    @property
    def gap(self) -> float:
        """By how much the highest counter of a waiting party exceeds the lowest; 0 if fewer than two wait."""
        waiting = {share.name: share.counter for _, _, share in self._waiting if share.waiting}
        return max(waiting.values()) - min(waiting.values()) if waiting else 0.0

    def _share(self, name: str) -> _Share:
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = _Share(name, self._floor)
        return share

    def _push(self, heap: list[tuple[float, int, _Share]], share: _Share) -> None:
        share.entry = next(self._numbers)
        heapq.heappush(heap, (share.counter, share.entry, share))
        if len(heap) > 2 * len(self._shares) + _SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[1] == entry[2].entry]
            heapq.heapify(heap)

    def _raise_floor(self) -> None:
        lowest = next(self._lowest_waiting(), None)
        if lowest is not None:
            self._floor = max(self._floor, lowest)

    def _lowest_waiting(self) -> Iterator[float]:
        heap = self._waiting
        while heap:
            counter, entry, share = heap[0]
            if entry != share.entry or not share.waiting:
                heapq.heappop(heap)
            elif counter < share.counter:
                heapq.heapreplace(heap, (share.counter, entry, share))
            else:
                yield counter

    def _forget(self) -> list[str]:
        """Drop idle counters at or below the floor, and the lowest ones when too many are kept; return their names."""
        heap, forgotten = self._idle, []
        while heap:
            counter, entry, share = heap[0]
            if entry == share.entry and not share.waiting:
                idle = len(self._shares) - self._waiting_shares
                if counter > self._floor and idle <= self._remembered:
                    break
                del self._shares[share.name]
                forgotten.append(share.name)
            heapq.heappop(heap)
        return forgotten


class VirtualCounters:
    """Counts service in weighted tokens, for each tenant, and within it for each of its subjects.

    Every token counts on both levels, divided by the weight that the limits give there. So tenants share by their
    weights regardless of their number of subjects, and subjects share the service of their tenant. A tenant or subject
    has its throttled weight while the newest request that arrived says that one of its budgets is nearly used up.
    """

    def __init__(self, config: ShareConfig) -> None:
        """Start with all counters and all weights equal."""
        self._config = config
        self._limits = Limits()
        # Cached limits of tenants that have been looked up.
        self._known: dict[str, TenantLimits] = {}
        self._tenants = _Level(config.remembered)
        self._subjects: dict[str, _Level] = {}
        # Those that are throttled, oldest first: tenants by name, and subjects.
        self._throttled: dict[str | Subject, None] = {}
        # Tenants without a counter of their own whose subjects still have one; oldest first.
        self._left: dict[str, None] = {}

    def __len__(self) -> int:
        """Return the number of subject counters kept."""
        return sum(len(level) for level in self._subjects.values())

    def adopt(self, limits: Limits) -> None:
        """Charge by the weights of `limits` from now on; past charges stay, and their refunds."""
        self._limits = limits
        self._known.clear()

    def of_tenant(self, tenant: str) -> float:
        """Return a tenant's counter: the service that it has received, divided by its weight."""
        return self._tenants.counter(tenant)

    def of_subject(self, subject: Subject) -> float:
        """Return a subject's counter, comparable only with other subjects of its tenant."""
        level = self._subjects.get(subject.tenant)
        return 0.0 if level is None else level.counter(subject.name)

    @property
    def waiting_tenants(self) -> int:
        """Number of tenants with waiting requests."""
        return self._tenants.waiting

    @property
    def gap(self) -> float:
        """The most service by which a waiting tenant is ahead of another one, in weighted tokens."""
        return self._tenants.gap

    def weight_of_tenant(self, tenant: str) -> float:
        return self._limits_of(tenant).weight_while(throttled=tenant in self._throttled)

    def weight_of_subject(self, subject: Subject) -> float:
        tenant = self._limits_of(subject.tenant)
        own = tenant.subjects.get(subject.name, tenant.each_subject)
        return own.weight_while(throttled=subject in self._throttled)

    def weights_of(self, subject: Subject) -> ShareWeights:
        return ShareWeights(self.weight_of_tenant(subject.tenant), self.weight_of_subject(subject))

    def note_throttled(self, subject: Subject, options: RequestOptions) -> None:
        """Use the throttled weights that a request which arrives asks for, and the usual ones otherwise."""
        parties: tuple[tuple[str | Subject, bool], ...] = (
            (subject.tenant, options.tenant_is_throttled),
            (subject, options.subject_is_throttled),
        )
        for party, is_throttled in parties:
            self._throttled.pop(party, None)
            if is_throttled:
                self._throttled[party] = None
        while len(self._throttled) > self._config.remembered:
            del self._throttled[next(iter(self._throttled))]

    def enter(self, subject: Subject) -> None:
        """Count a request of the subject as waiting."""
        self._tenants.enter(subject.tenant)
        self._level(subject.tenant).enter(subject.name)

    def exit(self, subject: Subject) -> None:
        """Count a request of the subject as no longer waiting, for any reason."""
        self._subjects[subject.tenant].exit(subject.name)
        self._forget(self._tenants.exit(subject.tenant))

    def charge(
        self, subject: Subject, *, prompt_tokens: int = 0, output_tokens: int = 0, weights: ShareWeights | None = None
    ) -> None:
        """Charge prompt tokens and output tokens; negative: refund those that were not computed after all.

        A refund needs the `weights` of the charge, as those that hold now may differ; None: those.
        """
        amount = prompt_tokens + self._config.output_weight * output_tokens
        tenant, own = weights or self.weights_of(subject)
        self._level(subject.tenant).charge(subject.name, amount / own)
        self._forget(self._tenants.charge(subject.tenant, amount / tenant))

    def _limits_of(self, tenant: str) -> TenantLimits:
        limits = self._known.get(tenant)
        if limits is None:
            if len(self._known) >= self._config.remembered:
                self._known.clear()
            limits = self._known[tenant] = self._limits.of(tenant)
        return limits

    def _level(self, tenant: str) -> _Level:
        self._left.pop(tenant, None)
        level = self._subjects.get(tenant)
        if level is None:
            level = self._subjects[tenant] = _Level(self._config.remembered)
        return level

    def _forget(self, tenants: list[str]) -> None:
        for tenant in tenants:
            if len(self._subjects[tenant]):
                self._left[tenant] = None
            else:
                del self._subjects[tenant]
        while len(self._left) > self._config.remembered:
            oldest = next(iter(self._left))
            del self._left[oldest], self._subjects[oldest]


@dataclass(slots=True)
class _IdleRows:
    """The rows that a refused sequence leaves idle in each pass of a plan in flight, and the passes that are left.

    They were charged with `weights`.
    """

    sequence: Sequence
    rows: int
    passes: int
    weights: ShareWeights


class Billing:
    """Charges prompts at their start, for tokens not cached in their own view, and output as it is generated.

    Prompts that another group computes are charged when device pages are reserved for them.

    Images are charged when they are encoded, too: a token for each of their embeddings. A retraction charges nothing
    again, and a choice that ends before its prompt is computed is refunded the rest. A sequence that waits for memory
    is charged for idle rows of a plan when that is sent, and refunded those of passes that did not run. Refunds have
    the weights of their charges: a prompt keeps those with which it was charged first. Without counters every call is a
    no-op.
    """

    def __init__(
        self, rows: RowSlots, counters: VirtualCounters | None, batch_counters: VirtualCounters | None
    ) -> None:
        """Charge `counters` for the sequences in `rows`, and `batch_counters` for those of batches."""
        self._rows = rows
        self.counters = counters
        self._batch_counters = batch_counters
        # Those charged for the plans in flight.
        self._idle_rows: dict[StepId, _IdleRows] = {}

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Charge a part of a waiting sequence's prompt for which device pages are reserved."""
        counters = self._counters_of(sequence)
        if counters is not None:
            sequence.charged_ahead += tokens
            self._charge_prompt(counters, sequence, tokens)

    def start(self, sequence: Sequence, cached_tokens: int) -> None:
        """Charge the uncached prompt of a sequence that gets its first row, also what another group has computed."""
        counters = self._counters_of(sequence)
        if counters is not None:
            uncached = len(sequence.token_ids) - cached_tokens
            sequence.charged_tokens = len(sequence.token_ids)
            self._charge_prompt(counters, sequence, uncached - sequence.charged_ahead)

    def give_up(self, sequence: Sequence) -> None:
        """Refund a sequence that ends without a row what was charged ahead and has not arrived."""
        counters, remote = self._counters_of(sequence), sequence.remote
        if counters is None or remote is None or sequence.started_at is not None:
            return
        missing = sequence.charged_ahead - remote.arrived_tokens
        if missing > 0:
            self._charge_prompt(counters, sequence, -missing)

    def encode(self, sequence: Sequence, embeddings: int) -> None:
        """Charge images that are encoded for a sequence, in addition to their tokens."""
        counters = self._counters_of(sequence)
        if counters is not None and embeddings and not sequence.retractions:
            counters.charge(sequence.request.view.subject, prompt_tokens=embeddings)

    def settle(self) -> None:
        """Charge the output that all rows have generated since the last call."""
        if self.counters is None:
            return
        lengths = self._rows.length.tolist()
        generated: dict[tuple[Subject, bool], int] = {}
        for sequence in self._rows.occupants():
            assert sequence.row is not None, "occupants have a row"
            tokens = self._take_output(sequence, lengths[sequence.row])
            if tokens:
                payer = sequence.request.view.subject, sequence.is_batch
                generated[payer] = generated.get(payer, 0) + tokens
        for (subject, is_batch), tokens in generated.items():
            counters = self._batch_counters if is_batch else self.counters
            if counters is not None:
                counters.charge(subject, output_tokens=tokens)

    def charge_idle_rows(self, sequence: Sequence, step_id: StepId, rows: int, passes: int) -> None:
        """Charge a waiting sequence for tokens that other subjects could have generated in the pages kept for it.

        They would have run in `rows` rows for all passes of the plan `step_id`; see `note_pass`. So a prompt that needs
        most of the memory delays other tenants, and other subjects of its own tenant, only for its share of the time.
        """
        counters = self._counters_of(sequence)
        if counters is not None and rows:
            subject = sequence.request.view.subject
            weights = counters.weights_of(subject)
            counters.charge(subject, output_tokens=rows * passes, weights=weights)
            self._idle_rows[step_id] = _IdleRows(sequence, rows, passes, weights)

    def note_pass(self, result: StepResult) -> None:
        """Take note of the result of a pass; with the last one of a plan, refund idle rows of passes that did not run.

        The passes were left out for a prompt or abandoned, or all rows had stopped before them.
        """
        idle = self._idle_rows.get(result.step_id)
        if idle is None:
            return
        if not result.abandoned:
            idle.passes -= 1
        if result.last:
            self._refund(self._idle_rows.pop(result.step_id))

    def lose_plans(self) -> None:
        """Refund idle rows of the passes in flight, as the workers that had them are gone."""
        for idle in self._idle_rows.values():
            self._refund(idle)
        self._idle_rows.clear()

    def leave(self, sequence: Sequence, *, for_good: bool) -> None:
        """Charge the remaining output of a sequence that is about to lose its row.

        Refund its uncomputed prompt if `for_good`.
        """
        counters = self._counters_of(sequence)
        if counters is None or sequence.row is None:
            return
        generated = self._take_output(sequence, int(self._rows.length[sequence.row]))
        if generated:
            counters.charge(sequence.request.view.subject, output_tokens=generated)
        # Charged at the first start, but not planned yet.
        missing = sequence.charged_tokens - int(self._rows.planned[sequence.row])
        if for_good and missing > 0 and not sequence.is_prefilled and not sequence.retractions:
            self._charge_prompt(counters, sequence, -missing)

    def _refund(self, idle: _IdleRows) -> None:
        counters = self._counters_of(idle.sequence)
        if counters is not None and idle.passes:
            subject, tokens = idle.sequence.request.view.subject, idle.rows * idle.passes
            counters.charge(subject, output_tokens=-tokens, weights=idle.weights)

    def _charge_prompt(self, counters: VirtualCounters, sequence: Sequence, tokens: int) -> None:
        """Charge a part of a prompt, or refund one if negative, with the weights of the first charge for it."""
        subject = sequence.request.view.subject
        if sequence.prompt_weights is None:
            sequence.prompt_weights = counters.weights_of(subject)
        counters.charge(subject, prompt_tokens=tokens, weights=sequence.prompt_weights)

    def _counters_of(self, sequence: Sequence) -> VirtualCounters | None:
        return self._batch_counters if sequence.is_batch else self.counters

    def _take_output(self, sequence: Sequence, length: int) -> int:
        """Return the number of output tokens not charged yet, and mark them as charged."""
        generated = max(length - sequence.charged_tokens, 0)
        sequence.charged_tokens += generated
        return generated
