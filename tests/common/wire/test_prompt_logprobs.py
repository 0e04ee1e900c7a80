from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan
from common.wire.answers import span_from_wire, span_to_wire
from protos.gen.pando.v1 import common_pb2


def span_of(tokens: int, top: int, asked: int, first: int = 3) -> PromptLogprobSpan:
    generator = np.random.default_rng(tokens)

    def values(*shape: int) -> np.ndarray:
        return -generator.random(shape, np.float32)

    def ids(*shape: int) -> np.ndarray:
        return generator.integers(0, 1000, shape, np.int32)

    return PromptLogprobSpan(
        first, ids(tokens), values(tokens), ids(tokens), ids(tokens, top), values(tokens, top), values(tokens, asked)
    )


def equal(one: PromptLogprobSpan, other: PromptLogprobSpan) -> bool:
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))


@given(st.integers(1, 20), st.integers(0, 4), st.integers(0, 3))
def test_a_span_survives_the_wire(tokens: int, top: int, asked: int) -> None:
    span = span_of(tokens, top, asked)
    encoded = span_to_wire(span).SerializeToString()
    assert equal(span_from_wire(common_pb2.PromptLogprobSpan.FromString(encoded)), span)


@given(st.integers(1, 50), st.integers(0, 4), st.integers(0, 3), st.integers(1, 40))
def test_parts_are_bounded_and_make_up_the_whole(tokens: int, top: int, asked: int, limit: int) -> None:
    span = span_of(tokens, top, asked)
    parts = list(span.parts(limit))
    assert all(part.tokens == 1 or part.tokens * (1 + top + asked) <= limit for part in parts)
    assert [part.first for part in parts] == [span.first, *(part.end for part in parts[:-1])]
    joined = [
        np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(span) if field.name != "first"
    ]
    assert equal(PromptLogprobSpan(span.first, *joined), span)


@pytest.mark.parametrize("column", ["logprobs", "ranks", "top_logprobs"])
def test_columns_that_do_not_fit_together_are_refused(column: str) -> None:
    message = span_to_wire(span_of(4, 2, 1))
    getattr(message, column).append(1)
    with pytest.raises(InvalidRequestError, match="inconsistent lengths"):
        span_from_wire(message)


def test_the_first_token_reported_is_the_one_after_the_start() -> None:
    assert PromptLogprobs(start=0).reported(prompt_tokens=5) == 4
    assert PromptLogprobs(start=3).reported(prompt_tokens=5) == 1
    assert PromptLogprobs(start=4).reported(prompt_tokens=5) == 0
    assert PromptLogprobs(start=9).reported(prompt_tokens=5) == 0
