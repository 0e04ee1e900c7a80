from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from common.deltas import LogprobText, PromptLogprobsText, PromptUsage, TokenText
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
    st.none() | st.builds(PromptUsage, ids, ids),
    st.none() | st.builds(PromptLogprobsText, ids, st.lists(entries, max_size=2), st.none() | tokens, st.booleans()),
    tuples(ids),
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
