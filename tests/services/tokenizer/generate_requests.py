"""Requests for tests, valid unless changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.requests import GenerateRequest, Prompt
from common.types import ReplyTo, RequestId, SamplingParams, StopConditions, Subject, SubscriberId, View
from services.tokenizer.limits import Limits
from services.tokenizer.requests import Submission

LIMITS = Limits(model="tiny", max_context_tokens=100, vocabulary_size=50)


def request(name: str = "r1", prompt: Prompt | None = None, **changes: Any) -> GenerateRequest:
    """Return a valid request; `changes` go to sampling and stop conditions where the field is theirs."""
    sampling = {key: value for key, value in changes.items() if key in SamplingParams.__slots__}
    stop = {key: value for key, value in changes.items() if key in StopConditions.__slots__}
    rest = {key: value for key, value in changes.items() if key not in sampling and key not in stop}
    base = GenerateRequest(
        request_id=RequestId(name),
        view=View(Subject("acme", "ada")),
        model="tiny",
        prompt="hello" if prompt is None else prompt,
        sampling=replace(SamplingParams(), **sampling),
        stop=replace(StopConditions(), **stop),
    )
    return replace(base, **rest)


def submission(name: str = "r1", prompt: Prompt | None = None, **changes: Any) -> Submission:
    """Return a valid request from a gateway."""
    return Submission(request(name, prompt, **changes), ReplyTo(SubscriberId("gateway")))
