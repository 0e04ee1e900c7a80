"""Requests for tests, valid unless changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.requests import GenerateRequest, Prompt
from common.types import ReplyTo, RequestId, RequestOptions, SamplingParams, StopConditions, Subject, SubscriberId, View
from services.tokenizer.limits import ModelLimits
from services.tokenizer.relay import Submission

LIMITS = ModelLimits(model="tiny", max_context_tokens=100, vocabulary_size=50)


def request(name: str = "r1", prompt: Prompt | None = None, **changes: Any) -> GenerateRequest:
    """Return a valid request; each of `changes` goes to the part of the request that has the field."""
    sampling, stop, options = (
        {key: changes.pop(key) for key in part.__slots__ if key in changes}
        for part in (SamplingParams, StopConditions, RequestOptions)
    )
    options = {"sampling": SamplingParams(**sampling), "stop": StopConditions(**stop), **options}
    base = GenerateRequest(
        request_id=RequestId(name),
        view=View(Subject("acme", "ada")),
        model="tiny",
        prompt="hello" if prompt is None else prompt,
        options=RequestOptions(**options),
    )
    return replace(base, **changes)


def submission(name: str = "r1", prompt: Prompt | None = None, **changes: Any) -> Submission:
    """Return a valid request from a gateway."""
    return Submission(request(name, prompt, **changes), ReplyTo(SubscriberId("gateway")))
