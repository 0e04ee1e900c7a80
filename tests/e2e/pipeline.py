"""A deployment's pipeline without its edge: token ids in at the scheduler, token ids out of the detokenizer."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import grpc
import numpy as np

from common.rpc.options import CHANNEL_OPTIONS
from common.types import (
    CacheMode,
    ReplyTo,
    RequestId,
    RequestOptions,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    Subject,
    SubscriberId,
    View,
)
from common.wire.answers import finish_from_wire
from common.wire.requests import schedule_request_to_wire
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import Finish
    from tests.e2e.served import Served

TIMEOUT_S = 400.0


@dataclass(slots=True)
class Answer:
    """What came back for one prompt."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    cached_tokens: int = 0
    finish: Finish | None = None

    def add(self, delta: detokenizer_pb2.Delta) -> None:
        """Take the next delta."""
        assert self.finish is None, "a choice ends once"
        assert delta.first_token_index == len(self.token_ids), "a delta continues where the last one ended"
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        if delta.HasField("prompt_usage"):
            self.cached_tokens = delta.prompt_usage.cached_tokens
        if delta.HasField("finish"):
            self.finish = finish_from_wire(delta.finish)


@dataclass(frozen=True, slots=True)
class Round:
    """The answers to prompts that were submitted together, and what the scheduler did meanwhile."""

    answers: list[Answer]
    # The most rows that ran at one time, as far as seen.
    peak_rows: int
    retractions: int


def ask(
    served: Served,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    user: str = "somebody",
    cache_mode: CacheMode = CacheMode.DEFAULT,
) -> Round:
    """Submit greedy requests in one message, as the tokenizer would, and wait for all of them."""
    address_of = served.deployment.address_of
    with (
        grpc.insecure_channel(address_of("scheduler"), options=CHANNEL_OPTIONS) as to_scheduler,
        grpc.insecure_channel(address_of("detokenizer"), options=CHANNEL_OPTIONS) as to_detokenizer,
    ):
        scheduler = scheduler_pb2_grpc.SchedulerStub(to_scheduler)
        detokenizer = detokenizer_pb2_grpc.DetokenizerStub(to_detokenizer)
        subscriber = SubscriberId(f"test-{uuid.uuid4()}")
        deltas = detokenizer.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id=subscriber), timeout=TIMEOUT_S)
        # What the pipeline had to say before the subscriber is known would be lost.
        deltas.initial_metadata()
        state = scheduler.GetState(scheduler_pb2.GetStateRequest())
        retractions, peak_rows = state.retractions, 0

        schedules = [_request(ids, max_tokens, View(Subject("test", user)), subscriber, cache_mode) for ids in prompts]
        answers = {schedule.request_id: Answer() for schedule in schedules}
        outbox: SimpleQueue[scheduler_pb2.SchedulerSubmitRequest | None] = SimpleQueue()
        admissions = scheduler.Submit(iter(outbox.get, None), timeout=TIMEOUT_S)
        outbox.put(scheduler_pb2.SchedulerSubmitRequest(schedules=schedules))
        refused = [admission for admission in next(admissions).admissions if admission.HasField("rejected")]
        assert not refused
        for message in deltas:
            for delta in message.deltas:
                answers[delta.request_id].add(delta)
            state = scheduler.GetState(scheduler_pb2.GetStateRequest())
            peak_rows = max(peak_rows, state.running_rows)
            if all(answer.finish for answer in answers.values()):
                break
        deltas.cancel()
        outbox.put(None)
    return Round(list(answers.values()), peak_rows, state.retractions - retractions)


def _request(
    ids: Sequence[int], max_tokens: int, view: View, subscriber: SubscriberId, cache_mode: CacheMode
) -> scheduler_pb2.ScheduleRequest:
    return schedule_request_to_wire(
        ScheduleRequest(
            request_id=RequestId(f"test-{uuid.uuid4()}"),
            view=view,
            reply_to=ReplyTo(subscriber),
            token_ids=np.asarray(ids, dtype=np.int32),
            options=RequestOptions(
                SamplingParams(temperature=0.0), StopConditions(max_tokens=max_tokens), cache_mode=cache_mode
            ),
        )
    )
