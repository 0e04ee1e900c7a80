from __future__ import annotations

import pytest

from deploy.evaluation.bench.workloads.w1 import TOTAL_INPUT_TOKENS, TOTAL_OUTPUT_TOKENS, w1_requests


def test_the_totals_are_those_that_others_publish_for() -> None:
    requests = w1_requests()
    assert len(requests) == 256
    assert sum(request.input_tokens for request in requests) == 142_827 == TOTAL_INPUT_TOKENS
    assert sum(request.output_tokens for request in requests) == 133_966 == TOTAL_OUTPUT_TOKENS


def test_ids_and_lengths_are_in_their_ranges() -> None:
    for request in w1_requests():
        ids = request.segments[0].ids
        assert ids is not None
        assert len(ids) == request.input_tokens
        assert 100 <= len(ids) <= 1024
        assert 100 <= request.output_tokens <= 1024
        assert min(ids) >= 0
        assert max(ids) <= 10_000


def test_a_part_of_w1_is_a_prefix_of_the_whole() -> None:
    whole, part = w1_requests(), w1_requests(8, scale=0.1)
    assert w1_requests(8) == whole[:8]
    for small, large in zip(part, whole[:8], strict=True):
        ids, all_ids = small.segments[0].ids, large.segments[0].ids
        assert ids is not None
        assert all_ids is not None
        assert len(ids) == round(len(all_ids) * 0.1)
        assert ids == all_ids[: len(ids)]
        assert small.output_tokens == round(large.output_tokens * 0.1)


@pytest.mark.parametrize(("requests", "scale"), [(0, 1.0), (257, 1.0), (8, 0.0), (8, 1.5)])
def test_sizes_beyond_those_of_w1_are_refused(requests: int, scale: float) -> None:
    with pytest.raises(ValueError, match=r"W1|scale"):
        w1_requests(requests, scale)
