"""Updates of an answer as JSON, the form in which they are recorded.

An update is a list: index, text, token ids, and an object with its rarer parts, if it has any. Newer versions of the
gateway may append to lists and add to objects; what this version does not know is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from common.deltas import CachedPart, LogprobText, PromptLogprobsText, PromptUsage, TokenText
from common.types import ErrorCode, Finish, FinishReason, RequestFailure
from common.version_skew import known_fields, known_member
from gateway.generation.journal import ChoiceUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence


# An update of text and tokens alone, after its first fields.
PLAIN = ChoiceUpdate(0, "")[3:]


def encode_updates(updates: Sequence[ChoiceUpdate]) -> bytes:
    """Encode updates of requests that generate."""
    return orjson.dumps([*map(_encode, updates)])


def decode_updates(line: bytes) -> list[ChoiceUpdate]:
    """Decode the result of `encode_updates`."""
    return [_decode(*fields[:4]) for fields in orjson.loads(line)]


def encode_failure(failure: RequestFailure) -> dict[str, Any]:
    """Return a failure as JSON."""
    return {
        "code": failure.code.value,
        "message": failure.message,
        "param": failure.param,
        "retryable": failure.retryable,
        "retry_after_ms": failure.retry_after_ms,
    }


def decode_failure(fields: dict[str, Any]) -> RequestFailure:
    """Decode the result of `encode_failure`."""
    code = known_member(fields["code"], ErrorCode.INTERNAL)
    return RequestFailure(**{**known_fields(RequestFailure, fields), "code": code})


def _encode(update: ChoiceUpdate) -> list[object]:
    head: list[object] = [update.index, update.text, list(update.token_ids)]
    if update[3:] == PLAIN:
        return head
    rest: dict[str, object] = {}
    if update.logprobs:
        rest["logprobs"] = [_encode_logprob(entry) for entry in update.logprobs]
    if update.finish is not None:
        finish = update.finish
        assert finish.error is None, "a failure is no update"
        rest["finish"] = _encode_finish(finish)
    if update.prompt_usage is not None:
        rest["usage"] = [*update.prompt_usage[:2], [list(part) for part in update.prompt_usage.cached]]
    if update.prompt_logprobs is not None:
        part = update.prompt_logprobs
        entries = [_encode_logprob(entry) for entry in part.entries]
        rest["prompt_logprobs"] = [part.first, entries, part.lead and _encode_token(part.lead), part.is_last]
    if update.prompt_ids:
        rest["prompt_ids"] = list(update.prompt_ids)
    if update.weight_version:
        rest["weight_version"] = update.weight_version
    if update.forced_tokens or update.drafted_tokens:
        rest["unsampled"] = [update.forced_tokens, update.drafted_tokens]
    return [*head, rest] if rest else head


def _decode(index: int, text: str, ids: list[int], rest: dict[str, Any] | None = None) -> ChoiceUpdate:
    if rest is None:
        return ChoiceUpdate(index, text, tuple(ids))
    finish = rest.get("finish")
    usage = rest.get("usage")
    part = rest.get("prompt_logprobs")
    return ChoiceUpdate(
        index,
        text,
        tuple(ids),
        tuple(_decode_logprob(*fields[:4]) for fields in rest.get("logprobs", ())),
        _decode_finish(*finish[:5]) if finish else None,
        _decode_usage(*usage[: len(PromptUsage._fields)]) if usage else None,
        _decode_part(*part[:4]) if part else None,
        tuple(rest.get("prompt_ids", ())),
        rest.get("weight_version", ""),
        *rest.get("unsampled", (0, 0))[:2],
    )


def _decode_usage(prompt_tokens: int, cached_tokens: int, cached: list[Any] | None = None) -> PromptUsage:
    return PromptUsage(prompt_tokens, cached_tokens, tuple(CachedPart(*part[:3]) for part in cached or ()))


def _encode_finish(finish: Finish) -> list[object]:
    counts = (finish.accepted_prediction_tokens, finish.rejected_prediction_tokens)
    return [finish.reason.value, finish.matched_token_id, finish.matched_text, *counts]


def _decode_finish(reason: str, token_id: int | None, text: str | None, accepted: int = 0, rejected: int = 0) -> Finish:
    return Finish(
        known_member(reason, FinishReason.STOP),
        token_id,
        text,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
    )


def _decode_part(first: int, entries: list[Any], lead: list[Any] | None, is_last: bool) -> PromptLogprobsText:
    texts = [_decode_logprob(*fields[:4]) for fields in entries]
    return PromptLogprobsText(first, texts, _decode_token(*lead[:3]) if lead else None, is_last)


def _encode_logprob(entry: LogprobText) -> list[object]:
    top = [_encode_token(token) for token in entry.top]
    return [_encode_token(entry.token), top, list(entry.asked), entry.rank]


def _decode_logprob(token: list[Any], top: list[Any], asked: list[float | None], rank: int | None) -> LogprobText:
    others = tuple(_decode_token(*fields[:3]) for fields in top)
    return LogprobText(_decode_token(*token[:3]), others, tuple(map(_decode_float, asked)), rank)


def _encode_token(token: TokenText) -> list[object]:
    # Latin-1 has a character for each byte.
    return [token.token_id, token.logprob, token.text.decode("latin-1")]


def _decode_token(token_id: int, logprob: float | None, text: str) -> TokenText:
    return TokenText(token_id, _decode_float(logprob), text.encode("latin-1"))


def _decode_float(value: float | None) -> float:
    # JSON has no infinity: orjson writes null for the logarithm of 0.
    return float("-inf") if value is None else value
