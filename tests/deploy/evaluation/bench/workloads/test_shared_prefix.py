from __future__ import annotations

from collections import Counter

import pytest

from deploy.evaluation.bench.workloads.shared_prefix import SharedPrefixShape, shared_prefix_sessions

SHAPE = SharedPrefixShape(apps=4, users=10, requests_per_user=3, system_tokens=70, question_tokens=20, output_tokens=5)


def test_every_user_sends_the_configured_number_of_requests_to_one_app() -> None:
    requests = [session.requests[0] for session in shared_prefix_sessions(SHAPE)]
    assert Counter(request.user for request in requests) == {f"user-{user:05d}": 3 for user in range(10)}
    apps = {(request.user, request.segments[0].key) for request in requests}
    assert len(apps) == 10
    assert len({app for _, app in apps}) == 4


def test_questions_are_all_different_and_system_prompts_come_first() -> None:
    requests = [session.requests[0] for session in shared_prefix_sessions(SHAPE)]
    assert len({request.segments[1].key for request in requests}) == 30
    assert {request.segments[0].role for request in requests} == {"system"}
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(90, 5)}


def test_the_order_is_random_by_seed() -> None:
    assert shared_prefix_sessions(SHAPE, 1) == shared_prefix_sessions(SHAPE, 1)
    assert shared_prefix_sessions(SHAPE, 1) != shared_prefix_sessions(SHAPE, 2)


def test_the_default_is_workload_s1() -> None:
    requests = [session.requests[0] for session in shared_prefix_sessions(SharedPrefixShape())]
    assert len(requests) == 1024
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(3563 + 223, 64)}


def test_a_workload_without_users_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        shared_prefix_sessions(SharedPrefixShape(users=0))
