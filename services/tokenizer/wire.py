"""Converts between protobuf messages and this service's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidRequestError
from common.heads import HeadActivation
from common.requests import ChatMessage, ChatPrompt, GenerateRequest, ImageFile, PooledText, TokenPrompt, Truncation
from common.wire.answers import admission_to_wire
from common.wire.identity import view_from_wire
from common.wire.requests import options_from_wire, pooling_to_wire, reply_to_from_wire, request_id_from_wire
from protos.gen.pando.v1 import tokenizer_pb2
from services.tokenizer.relay import Submission

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.heads import Head
    from common.requests import ImageLimits, Prompt
    from common.types import Admission, ReasoningStyle, ToolStyle

_ACTIVATIONS = {
    HeadActivation.NONE: tokenizer_pb2.ACTIVATION_UNSPECIFIED,
    HeadActivation.SIGMOID: tokenizer_pb2.ACTIVATION_SIGMOID,
    HeadActivation.SOFTMAX: tokenizer_pb2.ACTIVATION_SOFTMAX,
}


def submission_from_wire(message: tokenizer_pb2.GenerateRequest) -> Submission:
    """Decode a request and the destination of its output.

    Raises:
        InvalidRequestError: identity, reply-to, request id or prompt is missing, or a part is invalid.
    """
    request = GenerateRequest(
        request_id=request_id_from_wire(message.request_id),
        view=view_from_wire(message.view),
        model=message.model,
        prompt=_prompt_from_wire(message),
        options=options_from_wire(message),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else None,
        truncate_prompt_tokens=(message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None),
        bad_words=tuple(message.bad_words),
        prediction=message.prediction,
        routing_key=message.routing_key if message.HasField("routing_key") else None,
        returns_prompt_ids=message.return_prompt_ids,
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
        images=tuple(map(_image_from_wire, message.images)),
    )
    return Submission(request, reply_to_from_wire(message.reply_to))


def chat_from_wire(message: tokenizer_pb2.ChatPrompt) -> ChatPrompt:
    """Decode a conversation."""
    has_variables = message.HasField("template_variables_json")
    return ChatPrompt(
        messages=tuple(_message_from_wire(entry) for entry in message.messages),
        tools_json=tuple(message.tools_json),
        add_generation_prompt=message.add_generation_prompt,
        continue_final_message=message.continue_final_message,
        template_variables_json=message.template_variables_json if has_variables else None,
        assistant_prefix=message.assistant_prefix if message.HasField("assistant_prefix") else None,
    )


def admissions_to_wire(admissions: Sequence[Admission]) -> tokenizer_pb2.TokenizerSubmitResponse:
    """Encode admissions for a gateway."""
    return tokenizer_pb2.TokenizerSubmitResponse(admissions=[admission_to_wire(admission) for admission in admissions])


def tool_style_to_wire(style: ToolStyle | None) -> tokenizer_pb2.ToolStyle.ValueType:
    """Encode the notation of tool calls."""
    return tokenizer_pb2.ToolStyle.Value(f"TOOL_STYLE_{style.name if style else 'UNSPECIFIED'}")


def reasoning_style_to_wire(style: ReasoningStyle | None) -> tokenizer_pb2.ReasoningStyle.ValueType:
    """Encode the marks of reasoning."""
    return tokenizer_pb2.ReasoningStyle.Value(f"REASONING_STYLE_{style.name if style else 'UNSPECIFIED'}")


def head_to_wire(head: Head | None) -> tokenizer_pb2.Head | None:
    """Encode a classification head, if there is one."""
    if head is None:
        return None
    return tokenizer_pb2.Head(
        pooling=pooling_to_wire(head.pooling),
        labels=head.labels,
        activation=_ACTIVATIONS[head.activation],
        score_activation=_ACTIVATIONS[head.score_activation],
    )


def image_limits_to_wire(limits: ImageLimits | None) -> tokenizer_pb2.ImageLimits | None:
    """Encode the limits of images, if the model takes any."""
    if limits is None:
        return None
    return tokenizer_pb2.ImageLimits(
        max_images=limits.max_images,
        max_file_bytes=limits.max_file_bytes,
        max_pixels=limits.max_pixels,
        max_frames=limits.max_frames,
        video_files=limits.video_files,
    )


def _prompt_from_wire(message: tokenizer_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "chat":
            return chat_from_wire(message.chat)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "pooled":
            return _pooled_from_wire(message.pooled)
        case _:
            raise InvalidRequestError("the prompt is missing", param="prompt")


def _pooled_from_wire(message: tokenizer_pb2.PooledText) -> PooledText:
    truncation = message.truncation if message.HasField("truncation") else None
    return PooledText(
        text=message.text,
        second=message.second if message.HasField("second") else None,
        instruction=message.instruction if message.HasField("instruction") else None,
        max_second_tokens=message.max_second_tokens if message.HasField("max_second_tokens") else None,
        truncation=Truncation(truncation.max_tokens, truncation.drop_beginning) if truncation else None,
    )


def _message_from_wire(message: tokenizer_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        name=message.name if message.HasField("name") else None,
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        tool_calls_json=message.tool_calls_json if message.HasField("tool_calls_json") else None,
        reasoning_content=message.reasoning_content if message.HasField("reasoning_content") else None,
        parts=tuple(map(_part_from_wire, message.parts)),
    )


def _part_from_wire(message: tokenizer_pb2.ContentPart) -> str | ImageFile:
    return _image_from_wire(message.image) if message.HasField("image") else message.text


def _image_from_wire(message: tokenizer_pb2.Image) -> ImageFile:
    rate = message.frames_per_second if message.HasField("frames_per_second") else None
    return ImageFile(
        message.data, message.detail or "auto", tuple(message.frames), rate, message.is_video_file, message.key
    )
