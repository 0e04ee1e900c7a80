"""The milestones of recent requests with their times, for those who ask why a request took as long as it did."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from common.tracing import is_recorded, record
from services.scheduler.core.milestones import MilestoneKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.spans import Value
    from common.types import Subject
    from services.scheduler.core.milestones import Milestone

SPANS = {
    MilestoneKind.ARRIVED: "queue",
    MilestoneKind.RETRACTED: "queue",
    MilestoneKind.STARTED: "prefill",
    MilestoneKind.PREFILLED: "decode",
}
# Some MB; the oldest requests are forgotten first.
MOST_REQUESTS = 4_096
# Of one request: it can have many choices, and be retracted often.
MOST_MILESTONES = 256


@dataclass(slots=True)
class RequestTimeline:
    """The milestones of one request, each with its time in seconds since 1970."""

    subject: Subject
    prompt_tokens: int
    milestones: list[tuple[float, Milestone]] = field(default_factory=list)


class Timelines:
    """Keeps the timelines of the last `limit` requests, open or ended."""

    def __init__(self, limit: int = MOST_REQUESTS) -> None:
        self._limit = limit
        self._requests: OrderedDict[str, RequestTimeline] = OrderedDict()

    def note(self, milestones: Iterable[Milestone], now: float) -> None:
        """Record milestones that were reached at `now`, in seconds since 1970."""
        for milestone in milestones:
            timeline = self._requests.get(milestone.request_id)
            if timeline is None:
                timeline = RequestTimeline(milestone.subject, milestone.prompt_tokens)
                self._requests[milestone.request_id] = timeline
                if len(self._requests) > self._limit:
                    self._requests.popitem(last=False)
            if len(timeline.milestones) < MOST_MILESTONES:
                timeline.milestones.append((now, milestone))
            if milestone.kind is MilestoneKind.ENDED and is_recorded(milestone.trace):
                choice = milestone.choice_index
                record_choice([each for each in timeline.milestones if each[1].choice_index == choice])

    def find(self, request_id: str, subject: Subject | None) -> RequestTimeline | None:
        """Return a request's timeline; None if it is not known, or not of `subject` (None: of anyone)."""
        timeline = self._requests.get(request_id)
        if timeline is None or subject not in (None, timeline.subject):
            return None
        return timeline


def record_choice(milestones: Sequence[tuple[float, Milestone]]) -> None:
    """Report the phases of a choice as spans: each time that it waited, was prefilled and decoded."""
    for (start, begun), (end, following) in pairwise(milestones):
        attributes: dict[str, Value] = {"pando.choice": begun.choice_index}
        if begun.kind is MilestoneKind.RETRACTED:
            attributes["pando.after_retraction"] = True
        if following.wait is not None:
            attributes["pando.waited_for"] = following.wait.value
        if begun.found is not None:
            found = begun.found
            attributes |= {
                "pando.cache.tokens": found.tokens,
                "pando.cache.public_tokens": found.public_tokens,
                "pando.cache.tenant_tokens": found.tenant_tokens,
                "pando.cache.host_tokens": found.host_tokens,
                "pando.cache.storage_tokens": found.storage_tokens,
            }
        if following.kind is MilestoneKind.ENDED:
            attributes["gen_ai.usage.output_tokens"] = following.output_tokens
        if begun.kind in SPANS:
            record(SPANS[begun.kind], begun.trace, start, end, attributes)
