"""The messages exchanged with tokenizers: requests, aborts and admissions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import PandoError
from common.types import Admission, RequestId
from common.wire.answers import admission_to_wire
from common.wire.requests import schedule_request_from_wire
from protos.gen.pando.v1 import scheduler_pb2
from services.scheduler.submissions import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.types import ScheduleRequest


def batch_from_wire(message: scheduler_pb2.SchedulerSubmitRequest) -> Batch:
    """Decode a tokenizer's message; requests that are invalid become their refusals."""
    return Batch(
        tuple(_request_from_wire(schedule) for schedule in message.schedules),
        tuple(RequestId(abort.request_id) for abort in message.aborts),
    )


def _request_from_wire(message: scheduler_pb2.ScheduleRequest) -> ScheduleRequest | Admission:
    try:
        return schedule_request_from_wire(message)
    except PandoError as error:
        return Admission(RequestId(message.request_id), len(message.token_ids), error.to_failure())


def admissions_to_wire(admissions: Iterable[Admission]) -> scheduler_pb2.SchedulerSubmitResponse:
    """Encode admissions for a tokenizer."""
    return scheduler_pb2.SchedulerSubmitResponse(admissions=[admission_to_wire(admission) for admission in admissions])
