"""The body of /v1/messages, and its conversion into a chat completion request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import orjson
from pydantic import BeforeValidator, Field, model_validator

from common.errors import InvalidRequestError
from gateway.endpoints.chat.schema import MAX_MESSAGES, OTHER_PARTS, THINKING_VARIABLES, ChatCompletionBody
from gateway.endpoints.chat.tools import MAX_TOOLS
from gateway.endpoints.generation_fields import INT32_MAX, MAX_STOP_TEXTS
from gateway.endpoints.schema import LEAVE_OUT, Refusal, Schema, is_empty, parse
from gateway.images.references import ImageReference, from_base64, from_file, from_url

Json: TypeAlias = dict[str, Any]  # Any: free JSON
FORMAT = "output_config.format"
MODES = {"auto": "auto", "any": "required", "none": "none"}


class TurnBody(Schema):
    """One message of the conversation."""

    role: str
    content: str | list[Json]


class MetadataBody(Schema):
    """The object `metadata`."""

    user_id: str | None = None


class OutputConfigBody(Schema):
    """The object `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Json | None = None


class ThinkingBody(Schema):
    """The object `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


class MessagesBody(Schema):
    """A request for a message."""

    takes_images: ClassVar[bool] = True

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        Refusal("output_format", is_empty, LEAVE_OUT),
        Refusal("mcp_servers", is_empty, LEAVE_OUT),
        Refusal("container", is_empty, LEAVE_OUT),
    )

    model: str | None = None
    messages: list[TurnBody] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    system: str | list[Json] | None = None
    metadata: MetadataBody | None = None
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOP_TEXTS)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Json] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Json | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None

    @model_validator(mode="after")
    def _thinking_leaves_room_for_an_answer(self) -> Self:
        thinking = self.thinking
        if thinking is None:
            return self
        if (thinking.budget_tokens is not None) != (thinking.type == "enabled"):
            message = "'thinking.budget_tokens' is required with the type \"enabled\", and only allowed with it."
            raise InvalidRequestError(message, param="thinking.budget_tokens")
        if thinking.budget_tokens is not None and thinking.budget_tokens >= self._most_tokens:
            message = "'thinking.budget_tokens' must be less than 'max_tokens'."
            raise InvalidRequestError(message, param="thinking.budget_tokens")
        return self

    @property
    def _most_tokens(self) -> int:
        return self.max_tokens

    @property
    def user_names(self) -> tuple[tuple[str, str | None], ...]:
        """The field that may name a user."""
        return (("metadata.user_id", self.metadata.user_id if self.metadata else None),)

    def image_references(self) -> list[ImageReference]:
        """Return the images of all messages.

        Raises:
            InvalidRequestError: an image is malformed.
        """
        return [
            _image(part.get("source"), f"{place}.source")
            for number, turn in enumerate(self.messages)
            if isinstance(turn.content, list)
            for inner, block in enumerate(turn.content)
            for place, part in _parts_of(block, f"messages[{number}].content[{inner}]")
            if isinstance(part, dict) and part.get("type") == "image"
        ]

    def to_chat(self) -> ChatCompletionBody:
        """Return the equivalent chat completion request.

        Raises:
            InvalidRequestError: a value is out of range or not supported.
        """
        messages: list[Json] = []
        if self.system:
            messages.append({"role": "system", "content": _texts(self.system, "system")})
        for number, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{number}]")
        choice = self.tool_choice or {}
        output = self.output_config or OutputConfigBody()
        fields = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "tools": [_tool(number, tool) for number, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _choice(choice) if choice else None,
            "reasoning_effort": output.effort,
            "response_format": _response_format(output.format),
            **_thinking_fields(self.thinking),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
        }
        try:
            return parse(ChatCompletionBody, fields)
        except InvalidRequestError as error:
            if error.param is None or not error.param.startswith("response_format"):
                raise
            raise InvalidRequestError(error.message.replace(error.param, FORMAT), param=FORMAT) from error


class CountTokensBody(MessagesBody):
    """A conversation whose tokens are to be counted; `max_tokens` is not needed, and any value is accepted."""

    max_tokens: Annotated[int, BeforeValidator(lambda _: 1)] = 1

    @property
    def _most_tokens(self) -> int:
        return INT32_MAX


def _messages(turn: TurnBody, where: str) -> list[Json]:
    if turn.role not in ("user", "assistant"):
        raise InvalidRequestError(f"'{where}.role' should be user or assistant.", param=f"{where}.role")
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    return _results(turn.content, where) if turn.role == "user" else [_answer(turn.content, where)]


def _results(blocks: list[Json], where: str) -> list[Json]:
    """Convert a user's blocks: first one message per tool result, then one with all texts and images."""
    results: list[Json] = []
    rest: list[str | ImageReference] = []
    for number, block in enumerate(blocks):
        parts = _parts_of(block, f"{where}.content[{number}]")
        if block.get("type") != "tool_result":
            rest += [_part(part, place, where) for place, part in parts]
            continue
        given = block.get("content")
        content = given if isinstance(given, str) else _joined([_part(part, place, where) for place, part in parts])
        results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
    return [*results, {"role": "user", "content": _joined(rest)}] if rest or not results else results


def _parts_of(block: Json, place: str) -> list[tuple[str, object]]:
    """Return the blocks in a tool result, or the block itself, each with its place."""
    if block.get("type") != "tool_result":
        return [(place, block)]
    content = block.get("content") or ()
    inner = content if isinstance(content, list | tuple) else [content]
    return [(f"{place}.content[{number}]", part) for number, part in enumerate(inner)]


def _part(block: object, place: str, where: str) -> str | ImageReference:
    """Return a text block's text, or the image of an image block."""
    if isinstance(block, dict) and block.get("type") == "image":
        return _image(block.get("source"), f"{place}.source")
    return _texts([block], where)


def _image(source: object, param: str) -> ImageReference:
    match source:
        case {"type": "base64", "data": data, "media_type": media_type}:
            return from_base64(data, f"{param}.data", media_type)
        case {"type": "url", "url": url}:
            return from_url(url, None, f"{param}.url")
        case {"type": "file", "file_id": file_id}:
            return from_file(file_id, None, f"{param}.file_id")
    message = f"'{param}' should have the type base64 with data and media_type, url with url, or file with file_id."
    raise InvalidRequestError(message, param=param)


def _joined(parts: list[str | ImageReference]) -> str | list[Json | ImageReference]:
    """Return texts as one text, joined by line breaks, and texts with images as parts of a chat message."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _answer(blocks: list[Json], where: str) -> Json:
    message: Json = {"role": "assistant", "content": None}
    texts = [block for block in blocks if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    if texts:
        message["content"] = _texts(texts, where)
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: Json) -> Json:
    function = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input") or {}).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}


def _texts(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, dict) else None
            problem = OTHER_PARTS.get(kind) if isinstance(kind, str) else None
            expected = f"has a block of the type {kind}: {problem}" if problem else "should have text and image blocks"
            raise InvalidRequestError(f"'{where}' {expected}.", param=where)
        texts.append(text)
    return "\n".join(texts)


def _tool(number: int, tool: Json) -> Json:
    if tool.get("type", "custom") != "custom":
        message = f"'tools[{number}].type' is not supported by this server with this value; only \"custom\" is."
        raise InvalidRequestError(message, param=f"tools[{number}].type")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _thinking_fields(thinking: ThinkingBody | None) -> Json:
    """Convert `thinking` to fields of a chat; templates read variables of both names."""
    if thinking is None:
        return {}
    variables = dict.fromkeys(THINKING_VARIABLES, thinking.type != "disabled")
    return {"thinking_token_budget": thinking.budget_tokens, "chat_template_kwargs": variables}


def _response_format(format_: Json | None) -> Json | None:
    """Convert the format of the output to `response_format` of a chat."""
    if format_ is None:
        return None
    if format_.get("type") != "json_schema":
        raise InvalidRequestError(f"'{FORMAT}.type' should be json_schema.", param=f"{FORMAT}.type")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format_.get("schema", {})}}


def _choice(choice: Json) -> object:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in MODES:
        raise InvalidRequestError("'tool_choice.type' should be auto, any, tool or none.", param="tool_choice.type")
    return MODES[kind]
