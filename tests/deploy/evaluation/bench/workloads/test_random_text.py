from __future__ import annotations

import pytest

from deploy.evaluation.bench.workloads.random_text import random_sessions


def test_prompts_share_nothing_and_have_the_lengths_asked_for() -> None:
    requests = [session.requests[0] for session in random_sessions(50, 256, 64)]
    assert len({request.segments[0].key for request in requests}) == 50
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(256, 64)}


def test_a_different_name_gives_different_prompts_of_the_same_lengths() -> None:
    first = random_sessions(9, 100, 20, length_spread=0.5, name="a", seed=4)
    second = random_sessions(9, 100, 20, length_spread=0.5, name="b", seed=4)
    keys = {session.requests[0].segments[0].key for session in first + second}
    assert len(keys) == 18
    assert [s.requests[0].input_tokens for s in first] == [s.requests[0].input_tokens for s in second]


def test_lengths_spread_as_far_as_asked_and_no_further() -> None:
    lengths = [session.requests[0].input_tokens for session in random_sessions(500, 100, 10, length_spread=0.2)]
    assert (min(lengths), max(lengths)) == (80, 120)


def test_lengths_are_a_function_of_the_seed() -> None:
    assert random_sessions(9, 99, 9, length_spread=0.5, seed=1) == random_sessions(9, 99, 9, length_spread=0.5, seed=1)
    assert random_sessions(9, 99, 9, length_spread=0.5, seed=1) != random_sessions(9, 99, 9, length_spread=0.5, seed=2)


def test_a_length_spread_that_allows_empty_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="spread"):
        random_sessions(1, 10, 10, length_spread=1.0)
