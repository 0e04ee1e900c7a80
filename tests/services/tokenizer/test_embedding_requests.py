"""Requests that embed their prompt: what the tokenizer lets through, and how it refuses the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import ContextLengthError, InvalidRequestError
from common.heads import Head, HeadActivation
from common.requests import ChatMessage, ChatPrompt
from common.tokenization.parts import EmbeddingTraits
from common.types import Pooling, RequestId, Resume
from services.tokenizer.limits import ModelLimits, check_prompt, check_request
from tests.services.tokenizer.generate_requests import LIMITS, request, submission
from tests.services.tokenizer.test_relay import Bench, settle

ENCODER = replace(LIMITS, embedding=EmbeddingTraits(is_encoder=True, pooling=Pooling.MEAN, dimensions=8))


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_every_model_embeds(pooling: Pooling) -> None:
    for limits in (LIMITS, ENCODER):
        check_request(request(pooling=pooling), limits)


@pytest.mark.parametrize("prompt", ["a text", ChatPrompt((ChatMessage("user", "Hello"),))])
def test_an_encoder_refuses_generation_and_names_its_endpoints(prompt: str | ChatPrompt) -> None:
    with pytest.raises(InvalidRequestError, match=r"`tiny` is an encoder.*/v1/embeddings") as caught:
        check_request(request(prompt=prompt), ENCODER)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("pooling", {"pooling": Pooling.FIRST}),
        ("n", {"pooling": Pooling.MEAN, "n": 2}),
        ("n", {"pooling": Pooling.MEAN, "resume": Resume((1,), 1)}),
    ],
)
def test_meaningless_pooling_options_are_refused_by_field(param: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request(**changes), LIMITS)
    assert caught.value.param == param


def test_a_text_may_fill_the_context() -> None:
    check_prompt(np.full(100, 3, np.int32), request(pooling=Pooling.MEAN), LIMITS)
    with pytest.raises(ContextLengthError, match=r"maximum context length is 100 tokens.*101 tokens"):
        check_prompt(np.full(101, 3, np.int32), request(pooling=Pooling.MEAN), LIMITS)
    with pytest.raises(ContextLengthError, match="Your maximum context length is 10"):
        check_prompt(np.full(11, 3, np.int32), request(pooling=Pooling.MEAN, max_context_tokens=10), LIMITS)


async def test_pooling_is_forwarded_and_leaves_the_stop_conditions_unchanged() -> None:
    bench = Bench()
    bench.relay.submit(bench.session, [submission("r1", pooling=Pooling.LAST, max_context_tokens=50)])
    await settle()
    ((sent,),) = bench.scheduler.batches
    assert sent.options.pooling is Pooling.LAST
    assert sent.options.stop.max_tokens is None


async def test_errors_use_the_client_s_name_for_the_prompt() -> None:
    bench = Bench()
    names = {"unnamed": None, "named": "text_2"}
    bench.relay.submit(
        bench.session,
        [submission(name, "x" * 101, pooling=Pooling.MEAN, prompt_name=said) for name, said in names.items()],
    )
    await settle()
    answers = {answer.request_id: answer.rejected for answer in await bench.session.take()}
    assert {name: failure and failure.param for name, failure in answers.items()} == {
        RequestId("unnamed"): "prompt",
        RequestId("named"): "text_2",
    }


def with_head(pooling: Pooling, labels: int = 2) -> ModelLimits:
    head = Head(pooling, tuple(map(str, range(labels))), HeadActivation.SOFTMAX)
    return replace(LIMITS, embedding=EmbeddingTraits(head=head))


@pytest.mark.parametrize(
    ("limits", "pooling"),
    [
        (LIMITS, Pooling.CLASSIFY),
        (with_head(Pooling.CLASSIFY), None),
        (with_head(Pooling.CLASSIFY), Pooling.LAST),
        (with_head(Pooling.CLASSIFY), Pooling.TOKEN_CLASSIFY),
        (with_head(Pooling.TOKEN_CLASSIFY), Pooling.CLASSIFY),
        (replace(LIMITS, embedding=EmbeddingTraits(only_embeds=True)), None),
    ],
)
def test_requests_for_which_the_model_has_no_head_are_refused(limits: ModelLimits, pooling: Pooling | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request(pooling=pooling), limits)
    assert caught.value.param == "model"


@pytest.mark.parametrize("pooling", [Pooling.CLASSIFY, Pooling.TOKEN_CLASSIFY])
def test_a_head_s_own_pooling_is_let_through(pooling: Pooling) -> None:
    check_request(request(pooling=pooling), with_head(pooling))


def test_outputs_of_each_token_are_limited() -> None:
    limits = replace(with_head(Pooling.TOKEN_CLASSIFY, labels=1024), max_context_tokens=2048)
    check_prompt(np.full(1024, 3, np.int32), request(pooling=Pooling.TOKEN_CLASSIFY), limits)
    with pytest.raises(ContextLengthError, match="1025 tokens with 1024 labels"):
        check_prompt(np.full(1025, 3, np.int32), request(pooling=Pooling.TOKEN_CLASSIFY), limits)
