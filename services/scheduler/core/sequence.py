"""One choice of a request in the scheduler, its prompt's log probabilities, and counts of choices by subject."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan, no_span
from common.types import EXPECTED_OUTPUT_TOKENS, pixel_bytes
from services.scheduler.cache.keys import tagged
from services.scheduler.cache.tiers.ledger import Patience

if TYPE_CHECKING:
    from common.deltas import CachedPart
    from common.limits import ShareWeights
    from common.steps import PageIds
    from common.transfers import TransferId
    from common.types import Finish, RowSlot, SamplingParams, ScheduleRequest, Subject, TokenIds
    from services.scheduler.cache.tiers.peer_reads import PeerFetch
    from services.scheduler.cache.tiers.storage_reads import Fetch
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.core.session import Session


class SequencePhase(Enum):
    """State of a sequence, normally in the order WAITING, PREFILL, DECODE, FINISHED.

    Retraction leads from PREFILL or DECODE back to WAITING.
    """

    WAITING = "WAITING"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    FINISHED = "FINISHED"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceAdapter:
    """The adapter of a sequence: its digest, and its tags in keys of the cache."""

    digest: str
    tags: TokenIds


class PrefillFollower(Protocol):
    """Learns of the progress of a sequence that is computed for another group."""

    def on_computed(self) -> None:
        """More of the prompt has been computed, and is in the cache."""

    def on_prefilled(self, sequence: Sequence, pages: PageIds) -> None:
        """All of the prompt has been computed, in these pages, which the sequence's row has until it ends."""

    def on_ended(self, finish: Finish | None) -> None:
        """The sequence has ended; None: without output."""


class Wait(Enum):
    """The last reason for which a sequence was passed over while it waited.

    TURN: others came first, or all rows or tokens of the steps were taken. PREFIX: another request of its view was
    computing the same prefix. LOAD: its pages were being loaded from host memory or storage, or computed by another
    group. MEMORY: there were not
    enough free pages. GRAMMAR: restarted workers did not have its grammar yet. ADAPTER: all slots of adapters that it
    may use were taken. IMAGE: encoders outside the group were encoding its images.
    """

    TURN = "turn"
    PREFIX = "prefix"
    LOAD = "load"
    MEMORY = "memory"
    GRAMMAR = "grammar"
    IMAGE = "image"
    ADAPTER = "adapter"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one choice. The queue owns it while it waits; the row table's arrays hold its tokens while it runs.

    `token_ids` [tokens] int32 is the input of the next prefill: the prompt, then the tokens generated before a
    retraction or a resume. `max_total_tokens` bounds prompt and output together. Times are seconds of the scheduler's
    monotonic clock.
    """

    request: ScheduleRequest
    choice_index: int
    handle: int
    sampling: SamplingParams
    token_ids: TokenIds
    max_total_tokens: int
    arrived_at: float
    # The sequence whose prefill this one waits for, to share it (n > 1).
    leader: Sequence | None = None
    phase: SequencePhase = SequencePhase.WAITING
    row: RowSlot | None = None
    lock: PrefixLock | None = None
    # Prefix hit of the first admission: reported to the requester and billed; a retraction does not change it.
    cached_tokens: int | None = None
    # The same by tier and level.
    cached: tuple[CachedPart, ...] = ()
    started_at: float | None = None
    retractions: int = 0
    # Those of them that were preemptions.
    preemptions: int = 0
    # Whether the cache has counted this request's use of its prefix.
    was_committed: bool = False
    # Tokens that its subject's charges account for: its known ids at the first start, and output since.
    charged_tokens: int = 0
    # Tokens of its prompt that were charged before it started, when device pages were reserved for them.
    charged_ahead: int = 0
    # Weights of its tenant and subject when its prompt was first charged, also for the refund.
    prompt_weights: ShareWeights | None = None
    # The load from the host that it waits for, and the number of loads it has waited for since it last had a row.
    awaited_load: TransferId | None = None
    loads: int = 0
    # For a slot that a load needs.
    patience: Patience = field(default_factory=Patience)
    # Tokens of its prefix that were loaded for it, or for another sequence while it waited.
    host_tokens: int = 0
    # Those of them that were fetched from storage to the host for it.
    storage_tokens: int = 0
    # Its lookup in storage, until it starts.
    fetch: Fetch | None = None
    # Its pages at another group that computes its prompt, if one does; it waits for them.
    remote: PeerFetch | None = None
    # The page after its lock's that the other group has computed up to the prompt's last token; a row starts with it.
    tail: PageIds | None = None
    # Follows its progress in place of a detokenizer, if it is computed for another group.
    follower: PrefillFollower | None = None
    # The open session that it is a turn of.
    session: Session | None = None
    # Whether its first token has arrived, and with it the whole prompt is in the cache for others.
    is_prefilled: bool = False
    # Whether it may not start, as workers that have restarted do not have its grammar yet.
    awaits_grammar: bool = False
    # Why it was last passed over while it waited.
    waits_for: Wait = Wait.TURN
    # None: the base model.
    adapter: SequenceAdapter | None = None
    # Set if its prompt's log probabilities are reported; only the first choice of a request reports them.
    scoring: PromptScoring | None = None
    # Positions of the first and after the last embedding of each image of its prompt.
    image_spans: tuple[tuple[int, int], ...] = ()
    # Of these images in keys of the cache, see `image_tags`; None: it has none.
    image_tags: TokenIds | None = None
    # Tokens drafted from its request's prediction.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.token_ids)

    @property
    def expected_tokens(self) -> int:
        """Tokens of KV that it is expected to need once it starts: its known ids, and a usual output."""
        return min(len(self.token_ids) + EXPECTED_OUTPUT_TOKENS, self.max_total_tokens)

    @property
    def cacheable_ids(self) -> TokenIds:
        """The known ids that may be matched in the cache, which never matches the last of them."""
        limit = None if self.scoring is None else self.scoring.cacheable_tokens
        return self.key_of(self.token_ids if limit is None else self.token_ids[:limit])

    def image_at(self, tokens: int) -> int | None:
        """Return where the image begins that a prefix of so many tokens would cut in two; None: it would cut none."""
        return next((first for first, end in self.image_spans if first < tokens < end), None)

    def has_image_tail(self, page_size: int) -> bool:
        """Return whether the last image ends on the page after the prompt's last whole one, and before its last token.

        Whole pages alone would cut this image in two, so it would be encoded again for its end.
        """
        last = self.prompt_tokens - 1
        return bool(self.image_spans) and last - last % page_size < self.image_spans[-1][1] <= last

    @property
    def start_pages(self) -> PageIds:
        """The pages that its row starts with: those of its lock, and its tail."""
        assert self.lock is not None, "it is admitted"
        return self.lock.pages if self.tail is None else np.concatenate([self.lock.pages, self.tail])

    @property
    def start_tokens(self) -> int:
        """The tokens whose KV is in these pages."""
        assert self.lock is not None, "it is admitted"
        return self.lock.matched_tokens if self.tail is None else self.prompt_tokens - 1

    @property
    def pixel_bytes(self) -> int:
        """The room that the pixels of its images take in a plan."""
        return pixel_bytes(self.request.images)

    def key_of(self, token_ids: TokenIds) -> TokenIds:
        """Return the ids by which the cache knows the first tokens of this sequence.

        An adapter shares no KV with others, and neither do images on the pages on which they begin and end.
        """
        if self.image_tags is not None:
            tags = self.image_tags[: len(token_ids)]
            token_ids = np.concatenate([token_ids[: len(tags)] ^ tags, token_ids[len(tags) :]])
        return token_ids if self.adapter is None else tagged(token_ids, self.adapter.tags)

    @property
    def is_batch(self) -> bool:
        """Whether it belongs to a batch and runs only while no other request is open."""
        return self.request.options.is_batch

    @property
    def is_silent(self) -> bool:
        """Whether only its prompt is computed; the one token sampled with that is not sent to the detokenizer."""
        return self.request.options.stop.max_tokens == 0 and self.request.options.pooling is None

    @property
    def has_request_started(self) -> bool:
        """Whether the request's first choice has had a row."""
        return (self.leader or self).started_at is not None

    @property
    def may_start(self) -> bool:
        """Whether it may have a row or device pages now.

        Its grammar is compiled, its leader's prefill, if any, is done or can no longer be shared, and it does not wait
        for pages of another group that have not been offered yet, or that arrive on the host.
        """
        if self.awaits_grammar or (self.remote is not None and self.remote.comes_outside):
            return False
        return self.leader is None or self.leader.is_prefilled or self.leader.phase is SequencePhase.FINISHED

    @property
    def awaits_arrival(self) -> bool:
        """Whether it waits for pages that another group computes."""
        return self.remote is not None and not self.remote.is_done


def initial_ids(request: ScheduleRequest) -> TokenIds:
    """Return prompt and resumed tokens, [tokens] int32."""
    if request.options.resume is None:
        return request.token_ids
    return np.concatenate([request.token_ids, np.array(request.options.resume.token_ids, dtype=np.int32)])


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log probabilities of some prompt tokens of a choice.

    `lead`, in the first part only, is the prompt token before the first one that has a log probability.
    """

    handle: int
    span: PromptLogprobSpan
    lead: int | None
    is_last: bool


class PromptScoring:
    """Tracks which log probabilities of a sequence's prompt are still to be reported."""

    __slots__ = ("_has_begun", "_next", "_prompt", "_wanted")

    def __init__(self, wanted: PromptLogprobs, prompt: TokenIds) -> None:
        """Start with the whole `wanted` range."""
        self._wanted = wanted
        self._prompt = prompt
        # Position of the next token to report.
        self._next = wanted.start + 1
        self._has_begun = False

    @property
    def remaining(self) -> PromptLogprobs | None:
        """The range that workers must report if the prompt is computed from now on; None: nothing."""
        return replace(self._wanted, start=self._next - 1) if self._next < len(self._prompt) else None

    @property
    def cacheable_tokens(self) -> int | None:
        """Number of leading tokens that may be matched in the cache, which never matches the last; None: no limit."""
        # Cached tokens are not computed, and the token before the next one to report has to be.
        return self._next if self._next < len(self._prompt) else None

    def begin(self, handle: int) -> PromptPart | None:
        """Return, once, a part without any log probabilities if none is to be computed; else None."""
        if self._has_begun or self.remaining:
            return None
        self._has_begun = True
        return self._part(handle, no_span(self._next))

    def take(self, handle: int, span: PromptLogprobSpan) -> PromptPart:
        """Return the part for a span from the workers; spans arrive in order."""
        assert span.first == self._next, f"expected position {self._next}, got {span.first}"
        part = self._part(handle, span)
        self._next = span.end
        self._has_begun = True
        return part

    def _part(self, handle: int, span: PromptLogprobSpan) -> PromptPart:
        start = self._wanted.start
        is_first = span.first == start + 1 and start < len(self._prompt)
        return PromptPart(handle, span, int(self._prompt[start]) if is_first else None, span.end >= len(self._prompt))


class Census:
    """Counters that keep no entry at zero."""

    def __init__(self) -> None:
        self.tenants: Counter[str] = Counter()
        # Counts per subject, by tenant.
        self.subjects: dict[str, Counter[Subject]] = {}

    def of(self, subject: Subject) -> int:
        """Return the number of sequences of `subject`."""
        subjects = self.subjects.get(subject.tenant)
        return 0 if subjects is None else subjects[subject]

    def add(self, subject: Subject) -> None:
        self.tenants[subject.tenant] += 1
        self.subjects.setdefault(subject.tenant, Counter())[subject] += 1

    def remove(self, subject: Subject) -> None:
        tenant, subjects = subject.tenant, self.subjects[subject.tenant]
        subjects[subject] -= 1
        if not subjects[subject]:
            del subjects[subject]
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant], self.subjects[tenant]
