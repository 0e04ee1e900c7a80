"""Times between tokens of free streams: only those while all streams run count, and what shortens them is an error."""

from __future__ import annotations

import pytest

from common.types import RequestId
from deploy.evaluation.bench.pipeline_client import PipelineRecord
from deploy.evaluation.experiments.grammar_streams import StreamError, gaps_of, require_success


def record(*arrivals_s: float, failure: str | None = None) -> PipelineRecord:
    return PipelineRecord(RequestId("one"), 0.0, tokens=len(arrivals_s), arrivals_s=list(arrivals_s), failure=failure)


def test_gaps_are_those_of_free_streams_while_all_run() -> None:
    free, other, constrained = record(1, 2, 4, 7, 11), record(1, 3, 6, 9), record(2, 4, 8)
    # From 4, the second token of the last one, to 8, the end of the first to end.
    assert gaps_of([free, other, constrained], free=2) == [3]
    assert gaps_of([free, other, constrained], free=1) == [3]
    assert gaps_of([free, other], free=2) == [3, 3, 3]


def test_streams_that_do_not_run_together_are_an_error() -> None:
    with pytest.raises(StreamError, match="stream 0 ended after 3 tokens"):
        gaps_of([record(1, 2, 3), record(4, 5, 6)], free=1)


@pytest.mark.parametrize("failed", [record(1, 2, failure="unavailable"), record(1)])
def test_requests_that_fail_or_end_at_once_are_an_error(failed: PipelineRecord) -> None:
    require_success([record(1, 2)])
    with pytest.raises(StreamError, match="a request failed"):
        require_success([record(1, 2), failed])
