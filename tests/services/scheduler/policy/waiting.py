"""Waiting sequences in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.types import (
    ReplyTo,
    RequestId,
    RequestOptions,
    ScheduleRequest,
    Subject,
    SubscriberId,
    View,
)
from services.scheduler.core.queue import WaitingQueue
from services.scheduler.core.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.core.queue import Waiting


def waiting_sequence(
    handle: int, *, arrived_at: float = 0.0, priority: int = 0, user: str = "ann", tenant: str = "tenant"
) -> Sequence:
    ids = np.array([1, 2, 3], np.int32)
    request = ScheduleRequest(
        request_id=RequestId(f"request-{handle}"),
        view=View(Subject(tenant, user)),
        reply_to=ReplyTo(SubscriberId("gateway")),
        token_ids=ids,
        options=RequestOptions(priority=priority),
    )
    return Sequence(
        request=request,
        choice_index=0,
        handle=handle,
        sampling=request.options.sampling,
        token_ids=ids,
        max_total_tokens=8,
        arrived_at=arrived_at,
    )


class _Recorder:
    waiting: Waiting

    def order(self, waiting: Waiting, match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        self.waiting = waiting
        return ()


def line_up(sequences: Iterable[Sequence]) -> Waiting:
    """Return the sequences as a queue offers them to a policy."""
    recorder = _Recorder()
    queue = WaitingQueue(recorder)
    for sequence in sequences:
        queue.add(sequence)
    assert not list(queue.candidates(lambda _: 0))
    return recorder.waiting


def handles(sequences: Iterable[Sequence]) -> list[int]:
    return [sequence.handle for sequence in sequences]
