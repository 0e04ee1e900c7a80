"""What a request will use, as far as that can be told before it is encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.requests import ChatPrompt, TokenPrompt

if TYPE_CHECKING:
    from common.requests import GenerateRequest, Prompt

CHARACTERS_PER_TOKEN = 4


def announced_tokens(request: GenerateRequest) -> int:
    """Return about how many tokens `request` will use; an output without a limit counts when it is there."""
    return prompt_tokens(request.prompt) + (request.stop.max_tokens or 0) * request.n


def prompt_tokens(prompt: Prompt) -> int:
    """Return about how many tokens `prompt` is."""
    match prompt:
        case TokenPrompt(ids):
            return len(ids)
        case ChatPrompt(messages, tools_json):
            contents = sum(len(message.content or "") for message in messages)
            return (contents + sum(map(len, tools_json))) // CHARACTERS_PER_TOKEN
        case _:
            return len(prompt) // CHARACTERS_PER_TOKEN
