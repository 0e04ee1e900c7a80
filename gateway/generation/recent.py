"""Recent requests at this gateway: their times, submissions and tokens, but no text."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.types import ErrorCode, RequestId, TraceContext, View
    from gateway.generation.usage import Usage

# Some MB; the oldest are forgotten first.
MOST_REQUESTS = 4_096
# Of one request, which can have thousands of prompts.
MOST_SUBMISSIONS = 64


@dataclass(slots=True)
class RecentRequest:
    """One request; times are in seconds since 1970.

    `request_ids` are its submissions to the pipeline: one for each prompt, and one for each time that a choice was
    submitted again after a failure.
    """

    view: View
    model: str
    # As `gen_ai.operation.name` has it: chat, text_completion or embeddings.
    operation: str = "text_completion"
    trace: TraceContext | None = None
    request_ids: list[RequestId] = field(default_factory=list)
    resubmissions: int = 0
    received_at: float = field(default_factory=time.time)
    first_token_at: float | None = None
    ended_at: float | None = None
    # None: it was completed, or is still open.
    failure: ErrorCode | None = None
    was_cut_short: bool = False
    usage: Usage | None = None

    def submit(self, request_id: RequestId, *, again: bool = False) -> None:
        """Note a submission."""
        self.resubmissions += again
        if len(self.request_ids) < MOST_SUBMISSIONS:
            self.request_ids.append(request_id)

    def note_tokens(self) -> None:
        """Note that tokens have arrived."""
        if self.first_token_at is None:
            self.first_token_at = time.time()

    @property
    def status(self) -> str:
        """`open`, `completed`, `failed`, or `aborted` if it ended before all of its choices had."""
        if self.failure is not None:
            return "failed"
        if self.ended_at is None:
            return "open"
        return "aborted" if self.was_cut_short else "completed"


class RecentRequests:
    """Keeps the last `limit` requests by the ids that their clients were given."""

    def __init__(self, limit: int = MOST_REQUESTS) -> None:
        self._limit = limit
        self._requests: OrderedDict[str, RecentRequest] = OrderedDict()

    def add(self, name: str, request: RecentRequest) -> None:
        """Keep a request; a later one of the same name replaces it."""
        self._requests.pop(name, None)
        self._requests[name] = request
        if len(self._requests) > self._limit:
            self._requests.popitem(last=False)

    def find(self, name: str, may_see: Callable[[View], bool]) -> RecentRequest | None:
        """Return the request called `name`; None if it is not known, or must not be seen."""
        request = self._requests.get(name)
        return request if request is not None and may_see(request.view) else None
