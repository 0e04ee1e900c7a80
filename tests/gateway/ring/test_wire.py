from __future__ import annotations

from dataclasses import replace

import pytest

from common.deltas import Delta, LogprobText, PromptUsage, TokenText
from common.requests import ChatMessage, ChatPrompt, GenerateRequest, TokenPrompt
from common.types import (
    CacheMode,
    ErrorCode,
    Finish,
    FinishReason,
    Pooling,
    ReplyTo,
    RequestFailure,
    RequestId,
    Resume,
    SamplingParams,
    StopConditions,
    Subject,
    SubscriberId,
    TraceContext,
    View,
)
from common.wire import finish_to_wire, sampling_from_wire, stop_from_wire
from gateway.ring.wire import delta_from_wire, generate_to_wire, model_from_wire
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2, tokenizer_pb2

REPLY_TO = ReplyTo(SubscriberId("gateway-1"))
REQUEST = GenerateRequest(
    RequestId("cmpl-1"),
    View(Subject("acme", "ada")),
    "tiny",
    "Hello",
    SamplingParams(temperature=0.5, top_k=4, seed=2**64 - 1, logit_bias={3: -1.0}, top_logprobs=0),
    StopConditions(max_tokens=9, stop_strings=("\n",)),
    n=2,
    priority=-3,
    cache_mode=CacheMode.NONE,
    skip_special_tokens=False,
    timeout_ms=100,
    trace=TraceContext("00-a-b-01", "x=1"),
)


def sent(request: GenerateRequest) -> tokenizer_pb2.GenerateRequest:
    return tokenizer_pb2.GenerateRequest.FromString(generate_to_wire(request, REPLY_TO).SerializeToString())


def test_request_arrives_with_all_its_fields() -> None:
    message = sent(REQUEST)
    assert message.request_id == "cmpl-1"
    assert (message.view.subject.tenant, message.view.subject.name) == ("acme", "ada")
    assert message.reply_to.subscriber_id == "gateway-1"
    assert message.model == "tiny"
    assert message.WhichOneof("prompt") == "text"
    assert message.text == "Hello"
    assert sampling_from_wire(message.sampling) == REQUEST.sampling
    assert stop_from_wire(message.stop) == REQUEST.stop
    assert (message.n, message.priority, message.timeout_ms) == (2, -3, 100)
    assert message.cache_mode == common_pb2.CACHE_MODE_NONE
    assert message.skip_special_tokens is False
    assert not message.HasField("resume")
    assert (message.trace.traceparent, message.trace.tracestate) == ("00-a-b-01", "x=1")


def test_token_prompt_and_resume_arrive() -> None:
    message = sent(replace(REQUEST, prompt=TokenPrompt((1, 2)), resume=Resume((7, 8), 3)))
    assert list(message.token_ids.ids) == [1, 2]
    assert list(message.resume.token_ids) == [7, 8]
    assert message.resume.delivered_characters == 3


def test_conversation_arrives_with_absence_kept() -> None:
    messages = (ChatMessage("assistant", None, tool_calls_json="[]"), ChatMessage("tool", "3", tool_call_id="c"))
    chat = ChatPrompt(messages, ("{}",), add_generation_prompt=False, continue_final_message=True)
    message = sent(replace(REQUEST, prompt=chat)).chat
    assert not message.messages[0].HasField("content")
    assert message.messages[0].tool_calls_json == "[]"
    assert message.messages[1].tool_call_id == "c"
    assert list(message.tools_json) == ["{}"]
    assert not message.add_generation_prompt
    assert message.continue_final_message
    assert not message.HasField("template_variables_json")


def test_what_is_embedded_and_what_clients_call_it_arrive() -> None:
    message = sent(replace(REQUEST, pooling=Pooling.MEAN, prompt_name="text_1"))
    assert (message.pooling, message.prompt_name) == (common_pb2.POOLING_MEAN, "text_1")
    message = sent(REQUEST)
    assert message.pooling == common_pb2.POOLING_UNSPECIFIED
    assert not message.HasField("prompt_name")


def test_how_a_model_embeds_arrives() -> None:
    card = model_from_wire(
        tokenizer_pb2.GetModelResponse(
            model="minilm", is_encoder=True, pooling=common_pb2.POOLING_FIRST, embedding_dimensions=384
        )
    )
    assert (card.is_encoder, card.pooling, card.embedding_dimensions) == (True, Pooling.FIRST, 384)


@pytest.mark.parametrize(
    "finish",
    [
        None,
        Finish(FinishReason.STOP, embedding=b"\x00\x00\x80\x3f"),
        Finish(FinishReason.STOP, matched_text="\n"),
        Finish(FinishReason.ERROR, error=RequestFailure(ErrorCode.UNAVAILABLE, "away", retryable=True)),
    ],
)
def test_delta_arrives_with_all_its_fields(finish: Finish | None) -> None:
    message = detokenizer_pb2.Delta(
        request_id="cmpl-1",
        choice_index=1,
        first_token_index=5,
        token_ids=[8, 9],
        text="世",
        logprobs=[
            detokenizer_pb2.LogprobText(
                token=detokenizer_pb2.TokenText(token_id=8, logprob=-0.5, text=b"\xe4"),
                top=[detokenizer_pb2.TokenText(token_id=9, logprob=-1.5, text=b"x")],
            )
        ],
        prompt_usage=detokenizer_pb2.PromptUsage(prompt_tokens=7, cached_tokens=4),
        finish=finish_to_wire(finish) if finish else None,
    )
    assert delta_from_wire(message) == Delta(
        RequestId("cmpl-1"),
        1,
        5,
        (8, 9),
        "世",
        (LogprobText(TokenText(8, -0.5, b"\xe4"), (TokenText(9, -1.5, b"x"),)),),
        PromptUsage(7, 4),
        finish,
    )


def test_plain_delta_has_nothing_more() -> None:
    delta = delta_from_wire(detokenizer_pb2.Delta(request_id="a", token_ids=[1], text="x"))
    assert (delta.logprobs, delta.prompt_usage, delta.finish) == ((), None, None)
