"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from gateway.endpoints.chat.tools import MAX_TOOLS, Choice, Thinking, Tools, reading_of, schemas_of, with_tools
from gateway.endpoints.generation_fields import INT32_MAX, MAX_TOP_LOGPROBS, GenerationFields
from gateway.endpoints.schema import LEAVE_OUT, Refusal, Schema, is_empty, never, to_json
from gateway.images.references import ImageReference, from_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.requests import ImageFile
    from gateway.parsing import ParsingRules
    from gateway.pipeline.port import ModelInfo

MAX_MESSAGES = 10_000
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Template variables that turn reasoning on or off.
THINKING_VARIABLES = ("enable_thinking", "thinking")
TEXT_PARTS = {"text": "text", "refusal": "refusal"}
IMAGE_PARTS = ("image_url", "image_file", "video_url", "video_file")
VIDEOS = "videos are taken by /v1/chat/completions, in parts of the type video_url"
# What other parts have, for their refusal; other APIs use the same words.
OTHER_PARTS = {
    "input_audio": "audio is not supported",
    "audio": "audio is not supported",
    "audio_url": "audio is not supported",
    "video_url": VIDEOS,
    "video_file": VIDEOS,
    "video": VIDEOS,
    "input_video": VIDEOS,
    "file": "documents are not supported; send their text",
    "input_file": "documents are not supported; send their text",
    "document": "documents are not supported; send their text",
}
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
EXAMPLE = '{"type": "text", "text": "Hello"}'

Content: TypeAlias = "str | tuple[str | dict[str, Any] | ImageReference, ...] | None"  # Any: the client's JSON


def _content(value: object) -> Content:
    """Return texts as one text, joined by line breaks, and texts with images in their order."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "should be a string or a list of content parts")
    parts = [_part(number, part) for number, part in enumerate(value)]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else tuple(parts)


def _part(number: int, part: object) -> str | dict[str, Any] | ImageReference:  # Any: the client's JSON
    if isinstance(part, ImageReference):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and isinstance(kind, str):
        text = part.get(TEXT_PARTS.get(kind, ""))
        if isinstance(text, str):
            return text
        if kind in IMAGE_PARTS:
            return part
        if kind in OTHER_PARTS:
            message = "part {number} has the type {kind}, and {problem}"
            raise PydanticCustomError(
                "content", message, {"number": number, "kind": kind, "problem": OTHER_PARTS[kind]}
            )
    message = "part {number} should be a text part, like {example}, or an image part of type image_url"
    raise PydanticCustomError("content", message, {"number": number, "example": EXAMPLE})


def _text(value: object) -> object:
    """Return content that has texts only."""
    content = _content(value)
    if isinstance(content, tuple):
        raise PydanticCustomError("content", "should have text parts only")
    return content


def _tool_calls(value: object) -> object:
    for call in value if isinstance(value, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise PydanticCustomError("tool_calls", "each call should have function.name and function.arguments, texts")
    return value


class Message(Schema):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content, PlainValidator(_content), WithJsonSchema(CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(_tool_calls)] = None  # Any: free JSON
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("message", "a message of role {role} should have content", {"role": self.role})
        return self

    def to_message(self, images: Iterator[ImageFile]) -> ChatMessage:
        """Return the message for the chat template; its images are the next of `images`."""
        calls = to_json(self.tool_calls, "messages") if self.tool_calls else None
        content = self.content
        parts: tuple[str | ImageFile, ...] = ()
        if isinstance(content, tuple):
            parts = tuple(part if isinstance(part, str) else next(images) for part in content)
            content = None
        elif content is None and not calls:
            # Null content is kept only together with calls; otherwise some templates would print it.
            content = ""
        return ChatMessage(self.role, content, self.name, self.tool_call_id, calls, self.reasoning_content, parts)


class Prediction(Schema):
    """Text that the output may repeat parts of (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_text)]


class Conversation(Schema):
    """The fields of a chat prompt."""

    takes_images: ClassVar[bool] = True

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Tools = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: variables of the model's template

    reasoning_effort: Effort | None = None
    # -1: no limit.
    thinking_token_budget: int | None = Field(None, ge=-1, le=INT32_MAX)

    @property
    def thinking(self) -> Thinking:
        """The reasoning that is asked for; variables of the template take precedence over other fields."""
        variables, effort, budget = self.chat_template_kwargs or {}, self.reasoning_effort, self.thinking_token_budget
        stated = [value for name in THINKING_VARIABLES if isinstance(value := variables.get(name), bool)]
        if budget == -1:
            budget = None
        is_on = None if effort is None and budget is None else effort != "none" and budget != 0
        return Thinking(all(stated) if stated else is_on, effort, budget)

    @property
    def callable_tools(self) -> list[dict[str, Any]]:  # Any: JSON schemas
        """The tools that the model may call."""
        is_forbidden = self.tool_choice is not None and self.tool_choice.mode == "none"
        return [] if is_forbidden else self.tools or []

    def image_references(self) -> list[ImageReference]:
        """Return the images of all messages, in their order.

        Raises:
            InvalidRequestError: an image is malformed.
        """
        return [
            part if isinstance(part, ImageReference) else from_part(part, f"messages[{number}].content[{place}]")
            for number, message in enumerate(self.messages)
            if isinstance(message.content, tuple)
            for place, part in enumerate(message.content)
            if not isinstance(part, str)
        ]

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the start of a new assistant turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def to_prompt(self, assistant_prefix: str = "", images: Sequence[ImageFile] = ()) -> ChatPrompt:
        """Return the conversation for the chat template; the output begins with `assistant_prefix`.

        `images` are the contents of `image_references`.

        Raises:
            InvalidRequestError: the flags contradict each other, or some JSON is nested too deeply.
        """
        if self.continue_final_message and self.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' must not both be true."
            raise InvalidRequestError(message, param="continue_final_message")
        if assistant_prefix and not self.opens_answer:
            message = "'tool_choice' cannot ask for a call where no answer begins."
            raise InvalidRequestError(message, param="tool_choice")
        variables = self._template_variables()
        unused = iter(images)
        return ChatPrompt(
            messages=tuple(message.to_message(unused) for message in self.messages),
            tools_json=tuple(to_json(tool, "tools") for tool in self.callable_tools),
            add_generation_prompt=self.opens_answer,
            continue_final_message=bool(self.continue_final_message),
            template_variables_json=to_json(variables, "chat_template_kwargs") if variables else None,
            assistant_prefix=assistant_prefix or None,
        )

    def _template_variables(self) -> dict[str, Any]:  # Any: free JSON
        thinking = self.thinking
        fields: dict[str, Any] = {"reasoning_effort": thinking.effort, "thinking_budget": thinking.budget}
        stated = self.chat_template_kwargs or {}
        if not stated.keys() & set(THINKING_VARIABLES):
            fields |= dict.fromkeys(THINKING_VARIABLES, thinking.is_on)
        return {name: value for name, value in fields.items() if value is not None} | stated


class ChatCompletionBody(GenerationFields, Conversation):
    """A request for chat completions."""

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        *GenerationFields.unsupported,
        Refusal("functions", is_empty, "use 'tools'"),
        Refusal("function_call", lambda value: value in ("none", "auto"), "use 'tools'"),
        Refusal("modalities", lambda value: value in ([], ["text"]), 'only ["text"] is'),
        Refusal("audio", never, LEAVE_OUT),
        Refusal("add_special_tokens", lambda value: value is False, "the chat template brings them"),
        Refusal("web_search_options", never, LEAVE_OUT),
        Refusal("chat_template", never, "the model's own template is used"),
        Refusal("echo", is_empty, LEAVE_OUT),
        Refusal("best_of", lambda value: value == 1, "use 'n'"),
        Refusal("input_ids", is_empty, "use /v1/completions or /generate"),
        Refusal("documents", is_empty, "use 'chat_template_kwargs'"),
        Refusal("reasoning", is_empty, "use 'reasoning_effort'"),
        Refusal("include_reasoning", lambda value: value is True, LEAVE_OUT),
        Refusal("stream_reasoning", lambda value: value is True, LEAVE_OUT),
        Refusal("verbosity", lambda value: value == "medium", 'only "medium" is'),
    )

    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return self

    def reading(self, card: ModelInfo) -> ParsingRules:
        """Return the rules for parsing the model's output.

        Raises:
            InvalidRequestError: the requested tools cannot be called.
        """
        separates = self.separate_reasoning is not False
        reading = reading_of(card, self.thinking, separates=separates, opens_answer=self.opens_answer)
        in_parallel = self.parallel_tool_calls is not False
        return with_tools(reading, card, schemas_of(self.callable_tools), self.tool_choice, in_parallel=in_parallel)

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of a choice; None: up to the end of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def predicted_text(self) -> str:
        """Text that the output may repeat parts of; empty: none is known."""
        return self.prediction.content if self.prediction else ""

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of alternatives to report with each token's log probability; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
