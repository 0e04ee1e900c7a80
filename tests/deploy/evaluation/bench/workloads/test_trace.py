from __future__ import annotations

import json

import pytest

from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.workloads.trace import TraceOptions, parse_trace


def row(timestamp: int, length: int, hash_ids: list[int], output: int = 100, **more: object) -> bytes:
    fields = {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": hash_ids}
    return json.dumps({**fields, **more}).encode()


ROWS = [row(27_000, 1300, [46, 47, 48]), b"\n", row(30_000, 1024, [46, 47]), row(28_500, 600, [46, 99], user="bob")]


def test_lengths_times_and_users_come_from_the_trace() -> None:
    sessions = parse_trace(ROWS, TraceOptions())
    assert [session.arrival_s for session in sessions] == [0.0, 3.0, 1.5]
    requests = [session.requests[0] for session in sessions]
    assert [request.input_tokens for request in requests] == [1300, 1024, 600]
    assert [request.user for request in requests] == ["trace", "trace", "bob"]


def test_equal_hash_ids_are_equal_content() -> None:
    maker = PromptMaker()
    first, second, third = (
        [int(token) for token in maker.prompt(session.requests[0].segments)]
        for session in parse_trace(ROWS, TraceOptions())
    )
    assert first[:1024] == second
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:]


def test_a_trace_is_fitted_to_small_models_with_its_sharing_intact() -> None:
    maker = PromptMaker()
    sessions = parse_trace(ROWS, TraceOptions(scale=0.1, speed=3.0, count=2, user=None))
    assert [session.arrival_s for session in sessions] == [0.0, 1.0]
    first, second = (session.requests[0] for session in sessions)
    assert (first.input_tokens, first.output_tokens, first.user) == (130, 10, None)
    prefix = [int(token) for token in maker.prompt(second.segments)]
    assert [int(token) for token in maker.prompt(first.segments)][:102] == prefix


def test_prompt_beyond_the_hashed_blocks_is_the_requests_own() -> None:
    maker = PromptMaker()
    one, other = parse_trace([row(0, 700, [1]), row(1, 700, [1])], TraceOptions())
    first, second = (list(maker.prompt(session.requests[0].segments)) for session in (one, other))
    assert len(first) == 700
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


@pytest.mark.parametrize(
    ("line", "what"),
    [(b"{half", "not JSON"), (b"[]", "numbers"), (b'{"timestamp": 1}', "numbers"), (row(0, 5, []) + b"]", "not JSON")],
)
def test_a_wrong_line_is_named(line: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=rf"trace:2: .*{what}"):
        parse_trace([row(0, 5, [1]), line], TraceOptions())
