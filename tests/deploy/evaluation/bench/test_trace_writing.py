from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from deploy.cli import main
from deploy.evaluation.bench.records import Segment
from deploy.evaluation.bench.trace_writing import BlockNames
from deploy.evaluation.bench.workloads.ideal import ideal_rates
from deploy.evaluation.bench.workloads.trace import TraceOptions, trace_sessions, trace_stream

if TYPE_CHECKING:
    from pathlib import Path


def test_equal_blocks_after_equal_prefixes_have_equal_ids() -> None:
    names = BlockNames(10)
    system, question, other = Segment("s", 25), Segment("q", 10), Segment("o", 10)
    assert names.ids([system, question]) == [0, 1, 2, 3]
    assert names.ids([system, other]) == [0, 1, 4, 5]
    assert names.ids([Segment("s", 20)]) == [0, 1]
    # The same content in another place is another block.
    assert names.ids([other, system]) == [6, 7, 8, 9]


def test_a_written_trace_is_replayed_with_its_users_and_most_of_its_sharing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    assert main(["bench", "trace", str(path), "--requests", "400", "--users", "50", "--apps", "5"]) == 0
    assert "400 requests" in capsys.readouterr().out
    streamed = list(trace_stream(path, TraceOptions()))
    assert streamed == trace_sessions(path, TraceOptions())
    requests = [session.requests[0] for session in streamed]
    assert len({request.user for request in requests}) > 20
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [request.input_tokens for request in requests] == [row["input_length"] for row in rows]
    # Blocks of 512 tokens cannot tell where a prompt really parted, so that some of what is shared is lost.
    rates = ideal_rates(requests, keeps_answers=False)
    assert rates.within + rates.across > 0.3


def test_a_trace_out_of_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": t, "input_length": 5, "output_length": 1, "hash_ids": [1]} for t in (5, 4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"t\.jsonl:2: earlier"):
        list(trace_stream(path, TraceOptions()))
