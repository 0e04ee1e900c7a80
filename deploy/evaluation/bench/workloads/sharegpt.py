"""Conversations from a file in the format of ShareGPT exports.

The format is a JSON array of `{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession

if TYPE_CHECKING:
    from pathlib import Path

# An estimate for intended lengths; usage reports the true ones.
CHARACTERS_PER_TOKEN = 4
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class ShareGptOptions:
    """The selection of conversations, and limits on each."""

    count: int
    turns: int = 1
    """User turns of a conversation; later turns have the answers in the file as history."""
    output_tokens: int | None = None
    """Fixed length of answers; None: about the length of the answers in the file."""
    max_input_tokens: int = 1024
    max_output_tokens: int = 1024


def sharegpt_sessions(path: Path, options: ShareGptOptions, seed: int = 0) -> list[WorkloadSession]:
    """Return up to `count` sessions, one user each, drawn without replacement.

    Raises:
        ValueError: the file does not have this format, or no conversation in it is short enough.
    """
    try:
        entries = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not a JSON array of conversations")
    order = list(range(len(entries)))
    random.Random(seed).shuffle(order)
    sessions: list[WorkloadSession] = []
    for index in order:
        if len(sessions) == options.count:
            break
        if requests := _requests(entries[index], f"user-{index:05d}", options):
            sessions.append(WorkloadSession(requests))
    if not sessions:
        raise ValueError(f"{path} has no conversation of the right format and length")
    return sessions


def _requests(entry: Any, user: str, options: ShareGptOptions) -> tuple[BenchRequest, ...]:
    """Return one request per answered user turn, until a length limit is exceeded."""
    requests: list[BenchRequest] = []
    history: list[Segment] = []
    for question, answer in _turns(entry)[: options.turns]:
        prompt = (*history, _literal(question, "user"))
        output = options.output_tokens or estimate_tokens(answer)
        if sum(segment.tokens for segment in prompt) > options.max_input_tokens or output > options.max_output_tokens:
            break
        requests.append(BenchRequest(prompt, output, user=user))
        history = [*prompt, _literal(answer, "assistant")]
    return tuple(requests)


def _turns(entry: Any) -> list[tuple[str, str]]:
    """Return the (question, answer) pairs at the start of a conversation; empty if the JSON has another structure."""
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        return []
    parsed = [
        (ROLES.get(str(message.get("from", message.get("role")))), message.get("value", message.get("content")))
        for message in messages
        if isinstance(message, dict)
    ]
    if parsed and parsed[0][0] is None:
        parsed = parsed[1:]  # a system message, which few files have
    turns: list[tuple[str, str]] = []
    for (asker, question), (answerer, answer) in zip(parsed[::2], parsed[1::2], strict=False):
        if (asker, answerer) != ("user", "assistant") or not question or not answer:
            break
        turns.append((str(question), str(answer)))
    return turns


def _literal(text: str, role: str) -> Segment:
    return Segment("", estimate_tokens(text), role=role, text=text)


def estimate_tokens(text: str) -> int:
    """Return an estimate of the number of tokens of `text`, at least 1."""
    return max(1, len(text) // CHARACTERS_PER_TOKEN)
