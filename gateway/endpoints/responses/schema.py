"""The body of /v1/responses, and its conversion into a chat completion request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from gateway.endpoints.chat.schema import OTHER_PARTS, ChatCompletionBody, Effort
from gateway.endpoints.chat.tools import MAX_TOOLS
from gateway.endpoints.generation_fields import INT32_MAX, MAX_TOP_LOGPROBS
from gateway.endpoints.requester_fields import RequesterFields
from gateway.endpoints.schema import LEAVE_OUT, Refusal, Schema, is_empty, never, parse
from gateway.images.references import ImageReference, from_file, from_part, from_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Json: TypeAlias = dict[str, Any]  # Any: free JSON

PART_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
FORMAT = "text.format"
LOGPROBS = "message.output_text.logprobs"
MAX_INCLUDES = 32
MAX_METADATA = 16
MAX_METADATA_CHARACTERS = 512


def _input(value: object) -> object:
    """Convert the input to a list of items."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return value
    raise PydanticCustomError("input_type", "should be a string or a list of items")


def _metadata(value: object) -> object:
    if isinstance(value, dict):
        longest = max((max(len(str(key)), len(str(text))) for key, text in value.items()), default=0)
        if len(value) > MAX_METADATA or longest > MAX_METADATA_CHARACTERS:
            limits = {"count": MAX_METADATA, "size": MAX_METADATA_CHARACTERS}
            raise PydanticCustomError("metadata", "should have at most {count} texts of {size} characters", limits)
    return value


Input: TypeAlias = Annotated[
    list[Json],
    BeforeValidator(_input),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}),
]


class TextOptions(Schema):
    """The object `text`: options of the output text."""

    format: Json | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Schema):
    """The object `reasoning`."""

    effort: Effort | None = None
    summary: str | None = None


class ResponseBody(RequesterFields):
    """A request for a response."""

    takes_images: ClassVar[bool] = True

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        Refusal("moderation", never, LEAVE_OUT),
        Refusal("image", never, LEAVE_OUT),
        Refusal("conversation", never, "use 'previous_response_id'"),
        Refusal("prompt", never, "use 'instructions' and 'input'"),
        Refusal("max_tool_calls", never, LEAVE_OUT),
        Refusal("truncation", lambda value: value == "disabled", '"disabled" is'),
        Refusal("context_management", is_empty, LEAVE_OUT),
    )

    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_metadata)] = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] | None = Field(None, max_length=MAX_INCLUDES)
    tools: list[Json] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    priority: int | None = None

    @model_validator(mode="after")
    def _background_is_stored(self) -> Self:
        if self.background and self.store is False:
            message = "'background' needs 'store': the response is retrieved later."
            raise InvalidRequestError(message, param="background")
        return self

    @property
    def is_stored(self) -> bool:
        """Whether the response can be retrieved later."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities of the text are requested."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def new_messages(self) -> list[Json]:
        """Return the input as messages of a chat.

        Raises:
            InvalidRequestError: an item cannot be converted.
        """
        return to_messages(self.input)

    def to_chat(self, messages: list[Json]) -> ChatCompletionBody:
        """Return the chat completion request that continues `messages`.

        Raises:
            InvalidRequestError: a value is out of range or not supported.
        """
        head = [{"role": "developer", "content": self.instructions}] if self.instructions else []
        same = ("temperature", "top_p", "stream", "parallel_tool_calls", "priority", "cache_mode")
        fields: Json = {name: getattr(self, name) for name in same}
        fields |= {
            "model": self.model,
            "messages": [*head, *messages],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": True if self.wants_logprobs else None,
            "top_logprobs": self.top_logprobs,
            "tools": [_chat_tool(number, tool) for number, tool in enumerate(self.tools or [])] or None,
            "tool_choice": self.tool_choice,
            "response_format": _response_format(self.text.format if self.text else None),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "user_id": self.user_id,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
            "cache_salt": self.cache_salt,
        }
        try:
            return parse(ChatCompletionBody, fields)
        except InvalidRequestError as error:
            if error.param is None or not error.param.startswith("response_format"):
                raise
            raise InvalidRequestError(error.message.replace(error.param, FORMAT), param=FORMAT) from error


def to_messages(items: list[Json]) -> list[Json]:
    """Return items of a response's input or output as messages of a chat.

    The parts of one assistant turn (reasoning, text, calls) become one message.

    Raises:
        InvalidRequestError: an item is of an unknown kind, or malformed.
    """
    messages: list[Json] = []
    turn: Json | None = None
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item, where)})
            turn = None
            continue
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": _content(item, where)})
            turn = None
            continue
        if turn is None or (kind == "message" and turn["content"] is not None):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        _add_to_turn(turn, kind, item, where)
    return messages


def _add_to_turn(turn: Json, kind: object, item: Json, where: str) -> None:
    match kind:
        case "message":
            turn["content"] = _content(item, where)
        case "reasoning":
            thoughts = [part.get("text", "") for part in item.get("content") or [] if isinstance(part, dict)]
            turn["reasoning_content"] = "\n".join(map(str, thoughts)) or None
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        case _:
            raise InvalidRequestError(f"'{where}' is of a kind that is not supported here.", param=where)


def _content(item: Json, where: str, name: str = "content") -> object:
    """Return texts as one text, joined by line breaks, and texts with images as parts of a chat message."""
    content = item.get(name)
    if not isinstance(content, list):
        return content
    where = f"{where}.{name}"
    parts = [_part(part, where, number) for number, part in enumerate(content)]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: object, where: str, number: int) -> str | ImageReference:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and isinstance(kind, str):
        text = part.get(PART_TYPES.get(kind, ""))
        if isinstance(text, str):
            return text
        if kind == "input_image":
            return _image(part, f"{where}[{number}]")
        if kind in OTHER_PARTS:
            message = f"'{where}' has a part of the type {kind}: {OTHER_PARTS[kind]}."
            raise InvalidRequestError(message, param=where)
    raise InvalidRequestError(f"'{where}' should have parts of text, and of the type input_image.", param=where)


def _image(part: Json, param: str) -> ImageReference:
    url, file_id, detail = part.get("image_url"), part.get("file_id"), part.get("detail")
    if (url is None) == (file_id is None):
        raise InvalidRequestError(f"'{param}' should have either image_url or file_id.", param=param)
    if file_id is not None:
        return from_file(file_id, detail, f"{param}.file_id")
    return from_url(url, detail, f"{param}.image_url")


def _output(item: Json, where: str) -> object:
    return _content(item, where, "output")


def images_of(messages: Iterable[Json]) -> list[ImageReference]:
    """Return the images of messages that `to_messages` or `stored_messages` have returned."""
    return [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, ImageReference)
    ]


def to_stored(messages: Iterable[Json], found: Mapping[str, str]) -> list[Json]:
    """Return messages with their images as JSON; `found` are contents in base64, see `ImageReference.to_part`."""

    def stored(part: object) -> object:
        return part.to_part(found) if isinstance(part, ImageReference) else part

    return [
        {**message, "content": [stored(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def from_stored(messages: Iterable[Json]) -> list[Json]:
    """Return the messages that `to_stored` has written, whose errors name the field of the earlier response."""

    def read(part: Json) -> object:
        return part if part.get("type") == "text" else replace(from_part(part, ""), param="previous_response_id")

    return [
        {**message, "content": [read(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _response_format(format_: Json | None) -> Json | None:
    """Convert the format of the text to `response_format` of a chat."""
    if format_ is None or format_.get("type") != "json_schema":
        return format_
    named = {name: format_[name] for name in ("name", "description", "schema", "strict") if name in format_}
    return {"type": "json_schema", "json_schema": named}


def _chat_tool(number: int, tool: Json) -> Json:
    if tool.get("type") != "function":
        message = f"'tools[{number}].type' is not supported by this server with this value; only \"function\" is."
        raise InvalidRequestError(message, param=f"tools[{number}].type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
