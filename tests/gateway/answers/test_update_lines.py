from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from common.deltas import CachedPart, LogprobText, PromptLogprobsText, PromptUsage, TokenText
from common.types import CacheMode, ErrorCode, Finish, FinishReason, RequestFailure, TraceContext
from gateway.endpoints.opening import Opening
from gateway.generation.journal import ChoiceUpdate
from gateway.generation.update_lines import decode_failure, decode_updates, encode_failure, encode_updates
from gateway.identity.caller import Caller

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

ids = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
logprobs = st.floats(max_value=0, allow_nan=False, width=32)
tokens = st.builds(TokenText, ids, logprobs, st.binary(max_size=5))
entries = st.builds(
    LogprobText,
    tokens,
    st.lists(tokens, max_size=2).map(tuple),
    st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.integers(1, 100),
)


def tuples(of: SearchStrategy[int]) -> SearchStrategy[tuple[int, ...]]:
    return st.lists(of, max_size=3).map(tuple)


updates = st.builds(
    ChoiceUpdate,
    st.integers(0, 100),
    texts,
    tuples(ids),
    st.lists(entries, max_size=2).map(tuple),
    st.none()
    | st.builds(Finish, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.none() | ids, st.none() | texts),
    st.none()
    | st.builds(PromptUsage, ids, ids, st.lists(st.builds(CachedPart, texts, texts, ids), max_size=2).map(tuple)),
    st.none() | st.builds(PromptLogprobsText, ids, st.lists(entries, max_size=2), st.none() | tokens, st.booleans()),
    tuples(ids),
    forced_tokens=ids,
    drafted_tokens=ids,
)


@given(st.lists(updates, max_size=3))
def test_updates_survive_their_recording(given_updates: list[ChoiceUpdate]) -> None:
    line = encode_updates(given_updates)
    assert decode_updates(line) == given_updates
    assert b"\n" not in line


def test_a_plain_token_takes_few_bytes() -> None:
    assert encode_updates([ChoiceUpdate(0, " word", (1234,))]) == b'[[0," word",[1234]]]'


@given(
    st.builds(
        RequestFailure,
        st.sampled_from(ErrorCode),
        texts,
        st.none() | texts,
        st.booleans(),
        st.none() | st.integers(0, 10_000),
    )
)
def test_failures_survive_their_recording(failure: RequestFailure) -> None:
    assert decode_failure(encode_failure(failure)) == failure


@given(st.sampled_from(CacheMode), st.booleans(), st.none() | st.integers(0, 2**64 - 1), st.none() | texts)
def test_openings_survive_their_recording(mode: CacheMode, flag: bool, seed: int | None, state: str | None) -> None:
    caller = Caller("acme", "user/ann", vouches=flag, is_admin=not flag, cache=mode, max_priority=3)
    opening = Opening("/v1/x", {"a": [1, None]}, caller, "x-1", 5, TraceContext("00-1", state), seed, {"earlier": []})
    assert Opening.decode(opening.encode()) == opening


@given(st.lists(updates, max_size=3))
def test_updates_that_a_later_version_has_recorded_are_read(given_updates: list[ChoiceUpdate]) -> None:
    later = []
    for index, text, token_ids, *rest in orjson.loads(encode_updates(given_updates)):
        parts: dict[str, Any] = {"unknown": {"a": 1}, **(rest[0] if rest else {})}
        for name in ("finish", "usage", "prompt_logprobs"):
            if name in parts:
                parts[name].append("more")
        scored = [*parts.get("logprobs", ()), *parts.get("prompt_logprobs", [0, []])[1]]
        for entry in scored:
            for token in (entry[0], *entry[1]):
                token.append("more")
            entry.append("more")
        later.append([index, text, token_ids, parts, "more"])
    assert decode_updates(orjson.dumps(later)) == given_updates


def test_requests_that_a_later_version_has_recorded_are_read() -> None:
    caller = Caller("acme", "user/ann", cache=CacheMode.PRIVATE, is_batch=True)
    opening = Opening("/v1/x", {"a": 1}, caller, "x-1", 5, TraceContext("00-1"), 7)
    written = orjson.loads(opening.encode())
    for part in (written, written["caller"], written["trace"]):
        part["of_a_later_version"] = True
    assert Opening.decode(orjson.dumps(written)) == opening
    # A mode that is not known may be stricter than those that are.
    written["caller"]["cache"] = "of a later version"
    assert Opening.decode(orjson.dumps(written)).caller.cache is CacheMode.NONE


def test_requests_that_an_earlier_version_has_recorded_are_read() -> None:
    caller = {"tenant": "acme", "subject": "user/ann", "vouches": False, "is_admin": False, "cache": "default"}
    written = {"path": "/v1/x", "body": {}, "caller": caller, "id": "x-1", "created": 5, "trace": {"traceparent": "0"}}
    opening = Opening.decode(orjson.dumps(written))
    assert opening == Opening("/v1/x", {}, Caller("acme", "user/ann"), "x-1", 5, TraceContext("0"))


def test_failures_of_a_later_version_are_read() -> None:
    written = {**encode_failure(RequestFailure(ErrorCode.TIMEOUT, "late")), "code": "later", "unknown": 1}
    assert decode_failure(written) == RequestFailure(ErrorCode.INTERNAL, "late")
