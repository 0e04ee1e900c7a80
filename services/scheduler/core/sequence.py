"""One choice of a request on its way through the scheduler."""

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


class Phase(Enum):
    """Where a sequence stands; the order of a life is WAITING, PREFILL, DECODE, FINISHED.

    Retraction leads from PREFILL or DECODE back to WAITING.
    """

    WAITING = "WAITING"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    FINISHED = "FINISHED"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one choice. The queue owns it while it waits, the row table's arrays hold its tokens while it runs.

    `token_ids` [tokens] int32 is what the next prefill computes: the prompt, then what was generated before a
    retraction or a resume. `max_total_tokens` bounds prompt and output together. Times are seconds of the
    scheduler's monotonic clock.
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
    phase: Phase = Phase.WAITING
    row: RowSlot | None = None
    lock: PrefixLock | None = None
    # The first admission's prefix hit: what the requester is told and billed; a retraction does not change it.
    cached_tokens: int | None = None
    started_at: float | None = None
    retractions: int = 0
    # Of these, those that made way for a higher priority.
    preemptions: int = 0
    # Whether the cache has counted this request's use of its prefix.
    was_committed: bool = False
    # Output that its principal has been charged for, in tokens.
    charged_tokens: int = 0
    # The load from the host that it waits for, and how many it has waited for since it last had a row.
    awaited_load: TransferId | None = None
    loads: int = 0
    # Tokens of its prefix that were loaded for it, or for another while it waited.
    host_tokens: int = 0
    # Tokens of them that came to the host from storage for it.
    storage_tokens: int = 0
    # Its look into storage, until it starts.
    fetch: Fetch | None = None
    # The open session that it is a turn of.
    session: Session | None = None
    # Whether its first token has come, that is, whether its prompt is in the cache for others.
    is_prefilled: bool = False
    # Set: its prompt's log probabilities are told; of a request's choices the first one tells them.
    scoring: PromptScoring | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    @property
    def cacheable_ids(self) -> TokenIds:
        """The known ids as far as they may come from the cache; it leaves out the last of them."""
        limit = None if self.scoring is None else self.scoring.cacheable_tokens
        return self.token_ids if limit is None else self.token_ids[:limit]

    @property
    def is_silent(self) -> bool:
        """Whether its prompt is all that is computed for; the one token that comes with that is told to nobody."""
        return self.request.stop.max_tokens == 0 and self.request.pooling is None

    @property
    def may_start(self) -> bool:
        """Whether the sequence it wants to share a prefill with is past it."""
        return self.leader is None or self.leader.is_prefilled or self.leader.phase is Phase.FINISHED


def initial_ids(request: ScheduleRequest) -> TokenIds:
    """Return prompt and resumed tokens, [tokens] int32."""
    if request.resume is None:
        return request.token_ids
    return np.concatenate([request.token_ids, np.array(request.resume.token_ids, dtype=np.int32)])
