"""Common parts of the responses of several endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.server.errors import error_event

if TYPE_CHECKING:
    from common.deltas import LogprobText, TokenText
    from common.errors import PandoError
    from gateway.delivery.collecting import PromptScores
    from gateway.generation.usage import Usage

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; OpenAI's API returns this value for an impossible token.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields that all parts of one response repeat."""

    id: str
    created: int
    model: str
    fingerprint: str


def failed_stream(error: PandoError) -> bytes:
    """Return the event for a failure during the stream, and the end mark."""
    return b"data: " + error_event(error) + b"\n\n" + DONE


def version_field(usage: Usage) -> dict[str, object]:
    """Return the version of the weights as a field of a response, if it is known."""
    return {"weight_version": usage.weight_version} if usage.weight_version else {}


def usage_object(usage: Usage, reasoning_tokens: int = 0) -> dict[str, object]:
    """Return token counts in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def token_string(token: TokenText) -> str:
    r"""Return the token as text; bytes that are only part of a character become `bytes:\xe2\x80`."""
    try:
        return token.text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)


def finite_logprob(token: TokenText) -> float:
    """Return the log probability, limited to values that JSON can represent."""
    return max(token.logprob, LEAST_LOGPROB)


def by_id(scores: PromptScores, top: int) -> list[object]:
    """Return them in vLLM's shape: for each token an object keyed by id, null for the first."""
    nothing: list[object] = [None] if scores.lead else []
    return nothing + [_ids_object(entry, top) for entry in scores.entries]


def _ids_object(entry: LogprobText, top: int) -> dict[str, object]:
    ranked = [(token, rank) for rank, token in enumerate(entry.top[:top], 1)]
    return {
        str(token.token_id): {
            "logprob": finite_logprob(token),
            "rank": rank,
            "decoded_token": token.text.decode("utf-8", "replace"),
        }
        for token, rank in (*ranked, (entry.token, entry.rank))
    }
