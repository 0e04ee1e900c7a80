"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from gateway.endpoints.chat.schema import Conversation
from gateway.endpoints.generation_fields import TokenId  # noqa: TC001  (pydantic reads it at run time)
from gateway.endpoints.schema import Schema


class TokenizeTextBody(Schema):
    """A text to encode."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Conversation):
    """A conversation to render and encode."""

    model: str | None = None


class DetokenizeBody(Schema):
    """Ids to decode."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
