"""One choice of a request in the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from common.transfers import TransferId
    from common.types import RowSlot, SamplingParams, ScheduleRequest, TokenIds
    from services.scheduler.cache.tiers.storage_reads import Fetch
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.core.scoring import PromptScoring
    from services.scheduler.core.session import Session


class SequencePhase(Enum):
    """State of a sequence, normally in the order WAITING, PREFILL, DECODE, FINISHED.

    Retraction leads from PREFILL or DECODE back to WAITING.
    """

    WAITING = "WAITING"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    FINISHED = "FINISHED"


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
    started_at: float | None = None
    retractions: int = 0
    # Those of them that were preemptions.
    preemptions: int = 0
    # Whether the cache has counted this request's use of its prefix.
    was_committed: bool = False
    # Tokens that its subject's charges account for: its known ids at the first start, and output since.
    charged_tokens: int = 0
    # The load from the host that it waits for, and the number of loads it has waited for since it last had a row.
    awaited_load: TransferId | None = None
    loads: int = 0
    # Tokens of its prefix that were loaded for it, or for another sequence while it waited.
    host_tokens: int = 0
    # Those of them that were fetched from storage to the host for it.
    storage_tokens: int = 0
    # Its lookup in storage, until it starts.
    fetch: Fetch | None = None
    # The open session that it is a turn of.
    session: Session | None = None
    # Whether its first token has arrived, and with it the whole prompt is in the cache for others.
    is_prefilled: bool = False
    # Set if its prompt's log probabilities are reported; only the first choice of a request reports them.
    scoring: PromptScoring | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.token_ids)

    @property
    def cacheable_ids(self) -> TokenIds:
        """The known ids that may be matched in the cache, which never matches the last of them."""
        limit = None if self.scoring is None else self.scoring.cacheable_tokens
        return self.token_ids if limit is None else self.token_ids[:limit]

    @property
    def is_silent(self) -> bool:
        """Whether only its prompt is computed; the one token sampled with that is not sent to the detokenizer."""
        return self.request.options.stop.max_tokens == 0 and self.request.options.pooling is None

    @property
    def may_start(self) -> bool:
        """Whether its leader's prefill, if it has a leader, is done or can no longer be shared."""
        return self.leader is None or self.leader.is_prefilled or self.leader.phase is SequencePhase.FINISHED


def initial_ids(request: ScheduleRequest) -> TokenIds:
    """Return prompt and resumed tokens, [tokens] int32."""
    if request.options.resume is None:
        return request.token_ids
    return np.concatenate([request.token_ids, np.array(request.options.resume.token_ids, dtype=np.int32)])
