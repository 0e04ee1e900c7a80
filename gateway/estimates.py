"""Estimates of a request's tokens, before it is tokenized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.requests import ChatPrompt, TokenPrompt

if TYPE_CHECKING:
    from common.requests import GenerateRequest, Prompt

CHARACTERS_PER_TOKEN = 4


def announced_tokens(request: GenerateRequest) -> int:
    """Return the estimated number of prompt and output tokens of `request`; an output without a limit counts as 0."""
    return prompt_tokens(request.prompt) + (request.options.stop.max_tokens or 0) * request.options.n


def prompt_tokens(prompt: Prompt) -> int:
    """Return the estimated number of tokens of `prompt`."""
    match prompt:
        case TokenPrompt(ids):
            return len(ids)
        case ChatPrompt(messages, tools_json):
            contents = sum(len(message.content or "") for message in messages)
            return (contents + sum(map(len, tools_json))) // CHARACTERS_PER_TOKEN
        case _:
            return len(prompt) // CHARACTERS_PER_TOKEN
