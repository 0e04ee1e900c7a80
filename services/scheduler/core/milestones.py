"""Events of sequences since the last call: the core has no clock, so its caller notes the times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.types import Finish, Subject, TraceContext
    from services.scheduler.core.sequence import Sequence, Wait


class MilestoneKind(Enum):
    """An event of a sequence.

    ARRIVED: it waits. STARTED: it got a row. PREFILLED: its known tokens are computed. RETRACTED: it lost its row and
    waits again. ENDED: it has left.
    """

    ARRIVED = "arrived"
    STARTED = "started"
    PREFILLED = "prefilled"
    RETRACTED = "retracted"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """Tokens found in the cache at a start: all, and of these the public, the tenant's, and those of slower tiers."""

    tokens: int
    public_tokens: int
    tenant_tokens: int
    host_tokens: int
    storage_tokens: int


@dataclass(frozen=True, slots=True)
class Milestone:
    """One event of a choice.

    STARTED has `wait` and `found`, ENDED has `finish` (None: the detokenizer or a lost client ended it), the number of
    output tokens, and the tokens that the subject's fair share was charged.
    """

    kind: MilestoneKind
    request_id: str
    choice_index: int
    subject: Subject
    prompt_tokens: int
    trace: TraceContext | None
    wait: Wait | None = None
    found: FoundTokens | None = None
    finish: Finish | None = None
    output_tokens: int = 0
    charged_tokens: int = 0


class Milestones:
    """Collects milestones in their order; `take` empties it."""

    def __init__(self) -> None:
        self._pending: list[Milestone] = []

    def note(self, kind: MilestoneKind, sequence: Sequence) -> None:
        """Note an event of which there is nothing more to say."""
        self._pending.append(_milestone(kind, sequence))

    def note_start(self, sequence: Sequence) -> None:
        """Note that a sequence got a row; its lock says what the cache held."""
        lock = sequence.lock
        assert lock is not None, "a sequence with a row holds a lock"
        host = min(sequence.host_tokens, lock.matched_tokens)
        stored = min(sequence.storage_tokens, host)
        found = FoundTokens(lock.matched_tokens, lock.public_tokens, lock.tenant_tokens, host, stored)
        milestone = _milestone(MilestoneKind.STARTED, sequence)
        self._pending.append(replace(milestone, wait=sequence.waits_for, found=found))

    def note_end(self, sequence: Sequence, finish: Finish | None, output_tokens: int) -> None:
        """Note that a sequence leaves with `output_tokens` tokens of output."""
        milestone = _milestone(MilestoneKind.ENDED, sequence)
        charged = sequence.charged_tokens
        self._pending.append(replace(milestone, finish=finish, output_tokens=output_tokens, charged_tokens=charged))

    def take(self) -> list[Milestone]:
        """Return the milestones noted since the last call."""
        taken, self._pending = self._pending, []
        return taken


def _milestone(kind: MilestoneKind, sequence: Sequence) -> Milestone:
    request = sequence.request
    return Milestone(
        kind,
        request.request_id,
        sequence.choice_index,
        request.view.subject,
        sequence.prompt_tokens,
        request.options.trace,
    )
