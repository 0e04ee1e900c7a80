"""Converts between protobuf messages and the gateway's values; protobuf messages occur in `gateway/pipeline` only."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from common.deltas import Delta, LogprobText, PromptLogprobsText, PromptUsage, TokenText
from common.heads import Head, HeadActivation
from common.requests import ChatPrompt, ImageFile, ImageLimits, PooledText, TokenPrompt
from common.types import Pooling, ReasoningStyle, RequestId, ToolStyle
from common.wire.answers import cached_parts_from_wire, finish_from_wire
from common.wire.identity import view_to_wire
from common.wire.requests import options_to_wire, pooling_from_wire, reply_to_wire
from gateway.pipeline.port import ModelInfo
from protos.gen.pando.v1 import tokenizer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.requests import GenerateRequest
    from common.types import ReplyTo
    from protos.gen.pando.v1 import detokenizer_pb2

_TOOL_STYLES: dict[tokenizer_pb2.ToolStyle.ValueType, ToolStyle | None] = {
    tokenizer_pb2.TOOL_STYLE_UNSPECIFIED: None,
    **{tokenizer_pb2.ToolStyle.Value(f"TOOL_STYLE_{style.name}"): style for style in ToolStyle},
}
_REASONING_STYLES: dict[tokenizer_pb2.ReasoningStyle.ValueType, ReasoningStyle | None] = {
    tokenizer_pb2.REASONING_STYLE_UNSPECIFIED: None,
    **{tokenizer_pb2.ReasoningStyle.Value(f"REASONING_STYLE_{style.name}"): style for style in ReasoningStyle},
}

_ACTIVATIONS: dict[tokenizer_pb2.Activation.ValueType, HeadActivation] = {
    tokenizer_pb2.ACTIVATION_UNSPECIFIED: HeadActivation.NONE,
    tokenizer_pb2.ACTIVATION_SIGMOID: HeadActivation.SIGMOID,
    tokenizer_pb2.ACTIVATION_SOFTMAX: HeadActivation.SOFTMAX,
}


def generate_to_wire(request: GenerateRequest, reply_to: ReplyTo) -> tokenizer_pb2.GenerateRequest:
    """Encode a request; its output goes to `reply_to`."""
    message = tokenizer_pb2.GenerateRequest()
    write_generate(request, reply_to, message)
    return message


def write_generate(
    request: GenerateRequest,
    reply_to: ReplyTo,
    message: tokenizer_pb2.GenerateRequest,
    is_kept: Callable[[ImageFile], bool] = lambda _image: False,
) -> None:
    """Write a request into an empty message, in its place; of images that the tokenizer keeps, only their keys.

    A message that is put into another one is copied, at each level: milliseconds for the file of a photograph.
    """
    plain = tokenizer_pb2.GenerateRequest(
        request_id=request.request_id,
        view=view_to_wire(request.view),
        reply_to=reply_to_wire(reply_to),
        model=request.model,
        prompt_name=request.prompt_name,
        add_special_tokens=request.add_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        bad_words=request.bad_words,
        prediction=request.prediction,
        routing_key=request.routing_key,
        return_prompt_ids=request.returns_prompt_ids,
    )
    message.MergeFrom(plain)
    message.MergeFrom(options_to_wire(request.options, tokenizer_pb2.GenerateRequest))
    for image in request.images:
        _write_image(image.bare() if is_kept(image) else image, message.images.add())
    match request.prompt:
        case str(text):
            message.text = text
        case ChatPrompt() as chat:
            _write_chat(chat, message.chat, is_kept)
        case TokenPrompt(ids):
            message.token_ids.ids.extend(ids)
        case PooledText() as pooled:
            message.pooled.CopyFrom(_pooled_to_wire(pooled))
        case _ as never:
            assert_never(never)


def _pooled_to_wire(pooled: PooledText) -> tokenizer_pb2.PooledText:
    cut = pooled.truncation
    return tokenizer_pb2.PooledText(
        text=pooled.text,
        second=pooled.second,
        instruction=pooled.instruction,
        max_second_tokens=pooled.max_second_tokens,
        truncation=(
            tokenizer_pb2.Truncation(max_tokens=cut.max_tokens, drop_beginning=cut.drop_beginning) if cut else None
        ),
    )


def chat_to_wire(chat: ChatPrompt) -> tokenizer_pb2.ChatPrompt:
    """Encode a conversation."""
    wire = tokenizer_pb2.ChatPrompt()
    _write_chat(chat, wire, lambda _image: False)
    return wire


def _write_chat(chat: ChatPrompt, wire: tokenizer_pb2.ChatPrompt, is_kept: Callable[[ImageFile], bool]) -> None:
    """See `write_generate`."""
    plain = tokenizer_pb2.ChatPrompt(
        tools_json=chat.tools_json,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_variables_json=chat.template_variables_json,
        assistant_prefix=chat.assistant_prefix,
    )
    wire.CopyFrom(plain)
    for message in chat.messages:
        added = wire.messages.add(
            role=message.role,
            content=message.content,
            name=message.name,
            tool_call_id=message.tool_call_id,
            tool_calls_json=message.tool_calls_json,
            reasoning_content=message.reasoning_content,
        )
        for part in message.parts:
            if isinstance(part, ImageFile):
                _write_image(part.bare() if is_kept(part) else part, added.parts.add().image)
            else:
                added.parts.add(text=part)


def _write_image(image: ImageFile, message: tokenizer_pb2.Image) -> None:
    message.data, message.detail = image.data, image.detail
    message.frames.extend(image.frames)
    message.is_video_file = image.is_video_file
    if image.is_bare:
        message.key = image.key
    if image.frames_per_second is not None:
        message.frames_per_second = image.frames_per_second


def delta_from_wire(message: detokenizer_pb2.Delta) -> Delta:
    """Decode the output that a step added to a choice."""
    usage = None
    if message.HasField("prompt_usage"):
        of_prompt = message.prompt_usage
        parts = cached_parts_from_wire(of_prompt.cached)
        usage = PromptUsage(of_prompt.prompt_tokens, of_prompt.cached_tokens, parts)
    # By position, at half the cost: one is created per row and step.
    return Delta(
        RequestId(message.request_id),
        message.choice_index,
        message.first_token_index,
        tuple(message.token_ids),
        message.text,
        tuple(_logprob_from_wire(entry) for entry in message.logprobs) if message.logprobs else (),
        usage,
        finish_from_wire(message.finish) if message.HasField("finish") else None,
        _prompt_logprobs_from_wire(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None,
        message.weight_version,
        message.forced_tokens,
        message.drafted_tokens,
    )


def _prompt_logprobs_from_wire(message: detokenizer_pb2.PromptLogprobsText) -> PromptLogprobsText:
    return PromptLogprobsText(
        message.first_position,
        [_logprob_from_wire(entry) for entry in message.entries],
        _token_from_wire(message.lead) if message.HasField("lead") else None,
        message.is_last,
    )


def _logprob_from_wire(message: detokenizer_pb2.LogprobText) -> LogprobText:
    return LogprobText(
        _token_from_wire(message.token),
        tuple(_token_from_wire(token) for token in message.top),
        tuple(message.asked_logprobs),
        message.rank if message.HasField("rank") else None,
    )


def _token_from_wire(message: detokenizer_pb2.TokenText) -> TokenText:
    return TokenText(message.token_id, message.logprob, message.text)


def model_from_wire(message: tokenizer_pb2.GetModelResponse) -> ModelInfo:
    """Decode the served model's card."""
    return ModelInfo(
        name=message.model,
        max_context_tokens=message.max_context_tokens,
        vocabulary_size=message.vocabulary_size,
        has_chat_template=message.has_chat_template,
        created_unix_s=message.created_unix_s,
        tool_style=_TOOL_STYLES[message.tool_style],
        reasoning_style=_REASONING_STYLES[message.reasoning_style],
        begins_with_reasoning=message.begins_with_reasoning,
        begins_with_reasoning_on_request=message.begins_with_reasoning_on_request,
        begins_with_reasoning_although_off=message.begins_with_reasoning_although_off,
        reads_reasoning_effort=message.reads_reasoning_effort,
        tools_problem=message.tools_problem if message.HasField("tools_problem") else None,
        is_encoder=message.is_encoder,
        pooling=pooling_from_wire(message.pooling) or Pooling.LAST,
        embedding_dimensions=message.embedding_dimensions,
        only_embeds=message.only_embeds,
        head=_head_from_wire(message.head) if message.HasField("head") else None,
        prompts={prompt.name: prompt.text for prompt in message.prompts},
        default_prompt=message.default_prompt if message.HasField("default_prompt") else None,
        images=_image_limits_from_wire(message.images) if message.HasField("images") else None,
    )


def _image_limits_from_wire(message: tokenizer_pb2.ImageLimits) -> ImageLimits:
    return ImageLimits(
        message.max_images, message.max_file_bytes, message.max_pixels, message.max_frames, message.video_files
    )


def _head_from_wire(message: tokenizer_pb2.Head) -> Head | None:
    pooling = pooling_from_wire(message.pooling)
    if pooling is None:
        return None
    activation, of_scores = _ACTIVATIONS[message.activation], _ACTIVATIONS[message.score_activation]
    return Head(pooling, tuple(message.labels), activation, of_scores)
