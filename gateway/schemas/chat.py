"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from common.requests import ChatMessage, ChatPrompt
from gateway.schemas.generation import INT32_MAX, MAX_TOP_LOGPROBS, GenerationFields
from gateway.schemas.parse import Schema, to_json

TEXT_PARTS = {"text": "text", "refusal": "refusal"}


def _joined_parts(value: object) -> object:
    """Return content as one text; parts are joined by line breaks."""
    if not isinstance(value, list):
        if value is None or isinstance(value, str):
            return value
        raise PydanticCustomError("content_type", "should be a string or a list of content parts")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXT_PARTS.get(kind, "")) if isinstance(part, dict) and isinstance(kind, str) else None
        if not isinstance(text, str):
            message = "part {number} should be a text part, like {example}; this model reads text only"
            example = '{"type": "text", "text": "Hello"}'
            raise PydanticCustomError("content", message, {"number": number, "example": example})
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(value: object) -> object:
    for call in value if isinstance(value, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise PydanticCustomError("tool_calls", "each call should have function.name and function.arguments, texts")
    return value


def _tools(value: object) -> object:
    for tool in value if isinstance(value, list) else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise PydanticCustomError("tools", 'each tool should have type "function" and a function with a name')
    return value


class Message(Schema):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined_parts)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(_tool_calls)] = None  # Any: free JSON
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("message", "a message of role {role} should have content", {"role": self.role})
        return self

    def to_message(self) -> ChatMessage:
        """Return the message for the chat template."""
        calls = to_json(self.tool_calls, "messages") if self.tool_calls else None
        # Only beside calls is null a content; alone it would reach templates that print it.
        content = self.content if self.content is not None or calls else ""
        return ChatMessage(self.role, content, self.name, self.tool_call_id, calls, self.reasoning_content)


class Conversation(Schema):
    """What makes a chat prompt."""

    messages: list[Message] = Field(min_length=1)
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(_tools)] = None  # Any: JSON schemas
    tool_choice: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: whatever the model's template reads

    def to_prompt(self) -> ChatPrompt:
        """Return the conversation for the chat template.

        Raises:
            InvalidRequestError: the flags contradict each other, or some JSON is nested too deeply.
        """
        if self.continue_final_message and self.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' must not both be true."
            raise InvalidRequestError(message, param="continue_final_message")
        tools = self.tools if self.tools and self.tool_choice != "none" else ()
        variables = self.chat_template_kwargs
        generates = self.add_generation_prompt
        return ChatPrompt(
            messages=tuple(message.to_message() for message in self.messages),
            tools_json=tuple(to_json(tool, "tools") for tool in tools),
            add_generation_prompt=not self.continue_final_message if generates is None else generates,
            continue_final_message=bool(self.continue_final_message),
            template_variables_json=to_json(variables, "chat_template_kwargs") if variables else None,
        )


class ChatCompletionBody(GenerationFields, Conversation):
    """A request for chat completions."""

    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a choice; None: up to the end of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """How many alternatives to report beside each token's own log probability; None: nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None
