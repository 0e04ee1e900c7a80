"""The division of requests among messages to a scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.types import RequestOptions, Resume, SessionTurn
from common.wire.requests import schedule_request_to_wire
from protos.gen.pando.v1 import scheduler_pb2
from services.tokenizer.scheduler_link import BYTES_PER_TOKEN, split
from tests.services.tokenizer.routing.requests import schedule

TOKENS = 1000
LONG = tuple(range(TOKENS))


@pytest.mark.parametrize(
    "options",
    [
        RequestOptions(turn=SessionTurn("two", after="one", conversation_ids=LONG)),
        RequestOptions(resume=Resume(LONG, delivered_characters=0)),
    ],
)
def test_what_a_resubmitted_request_brings_counts_in_the_size_of_messages(options: RequestOptions) -> None:
    requests = [replace(schedule(f"r{number}"), options=options) for number in range(9)]
    parts = list(split(requests, max_tokens=4 * TOKENS))
    assert [each for part in parts for each in part] == requests
    for part in parts:
        message = scheduler_pb2.SchedulerSubmitRequest(schedules=map(schedule_request_to_wire, part))
        assert message.ByteSize() < 5 * TOKENS * BYTES_PER_TOKEN
