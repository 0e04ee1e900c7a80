"""The gateway's converter against those of the tokenizer and detokenizer: each end decodes what the other encoded."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from hypothesis import given

from common.heads import Head, HeadActivation
from common.requests import ImageLimits
from common.types import Pooling, ReasoningStyle, ReplyTo, ToolStyle
from gateway.pipeline.port import ModelInfo
from gateway.pipeline.wire import chat_to_wire, delta_from_wire, generate_to_wire, model_from_wire
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2, tokenizer_pb2
from services.detokenizer.wire import deltas_to_wire
from services.tokenizer.relay import Submission
from services.tokenizer.wire import chat_from_wire, submission_from_wire
from tests.common.strategies import chats, deltas, generate_requests, plain, reply_tos
from tests.examples import examples

if TYPE_CHECKING:
    from common.deltas import Delta
    from common.requests import ChatPrompt, GenerateRequest


@examples(40)
@given(generate_requests, reply_tos)
def test_a_request_survives_the_wire(request: GenerateRequest, reply_to: ReplyTo) -> None:
    encoded = generate_to_wire(request, reply_to).SerializeToString()
    decoded = submission_from_wire(tokenizer_pb2.GenerateRequest.FromString(encoded))
    assert plain(decoded) == plain(Submission(request, reply_to))


@examples(40)
@given(chats)
def test_a_conversation_survives_the_wire(chat: ChatPrompt) -> None:
    encoded = chat_to_wire(chat).SerializeToString()
    assert plain(chat_from_wire(tokenizer_pb2.ChatPrompt.FromString(encoded))) == plain(chat)


@examples(40)
@given(deltas)
def test_a_delta_survives_the_wire(delta: Delta) -> None:
    encoded = deltas_to_wire([delta]).SerializeToString()
    (message,) = detokenizer_pb2.SubscribeResponse.FromString(encoded).deltas
    assert plain(delta_from_wire(message)) == plain(delta)


def test_a_model_arrives_with_all_its_fields() -> None:
    message = tokenizer_pb2.GetModelResponse(
        model="minilm",
        max_context_tokens=512,
        vocabulary_size=30522,
        has_chat_template=True,
        created_unix_s=1700000000,
        tool_style=tokenizer_pb2.TOOL_STYLE_LLAMA3,
        has_reasoning=True,
        reasoning_style=tokenizer_pb2.REASONING_STYLE_SEED,
        begins_with_reasoning=True,
        begins_with_reasoning_on_request=True,
        begins_with_reasoning_although_off=True,
        reads_reasoning_effort=True,
        tools_problem="unknown",
        is_encoder=True,
        pooling=common_pb2.POOLING_FIRST,
        embedding_dimensions=384,
        only_embeds=True,
        head=tokenizer_pb2.Head(
            pooling=common_pb2.POOLING_TOKEN_CLASSIFY,
            labels=["O", "PER"],
            activation=tokenizer_pb2.ACTIVATION_SOFTMAX,
            score_activation=tokenizer_pb2.ACTIVATION_UNSPECIFIED,
        ),
        prompts=[tokenizer_pb2.NamedPrompt(name="query", text="Query: ")],
        default_prompt="query",
        images=tokenizer_pb2.ImageLimits(
            max_images=4, max_file_bytes=1 << 20, max_pixels=1 << 24, max_frames=9, video_files=True
        ),
    )
    assert {field.name for field, _ in message.ListFields()} == {field.name for field in message.DESCRIPTOR.fields}
    expected = ModelInfo(
        "minilm",
        512,
        30522,
        has_chat_template=True,
        created_unix_s=1700000000,
        tool_style=ToolStyle.LLAMA3,
        reasoning_style=ReasoningStyle.SEED,
        begins_with_reasoning=True,
        begins_with_reasoning_on_request=True,
        begins_with_reasoning_although_off=True,
        reads_reasoning_effort=True,
        tools_problem="unknown",
        is_encoder=True,
        pooling=Pooling.FIRST,
        embedding_dimensions=384,
        only_embeds=True,
        head=Head(Pooling.TOKEN_CLASSIFY, ("O", "PER"), HeadActivation.SOFTMAX, HeadActivation.NONE),
        prompts={"query": "Query: "},
        default_prompt="query",
        images=ImageLimits(4, 1 << 20, 1 << 24, 9, True),
    )
    assert model_from_wire(message) == expected
    assert all(getattr(expected, field.name) != field.default for field in fields(expected))


def test_each_way_to_mark_reasoning_arrives() -> None:
    arrived = {
        name: model_from_wire(tokenizer_pb2.GetModelResponse(reasoning_style=value)).reasoning_style
        for name, value in tokenizer_pb2.ReasoningStyle.items()
    }
    known = {f"REASONING_STYLE_{style.name}": style for style in ReasoningStyle}
    assert arrived == {"REASONING_STYLE_UNSPECIFIED": None, **known}


def test_each_way_to_write_tool_calls_arrives() -> None:
    arrived = {
        name: model_from_wire(tokenizer_pb2.GetModelResponse(tool_style=value)).tool_style
        for name, value in tokenizer_pb2.ToolStyle.items()
    }
    assert arrived == {"TOOL_STYLE_UNSPECIFIED": None, **{f"TOOL_STYLE_{style.name}": style for style in ToolStyle}}
