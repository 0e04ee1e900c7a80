"""Results of experiments that have a time limit: nothing that was measured is lost, and nothing begins too late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.bench.partial_results import Deadline, PartialResults, within_time
from deploy.evaluation.bench.results import read_results

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_each_value_is_shown_and_written_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    results = PartialResults("sleep", "shape", path)
    results.add("seconds to wake", "s", [2.0])
    assert "2.00 s" in capsys.readouterr().out
    assert [(one.metric, one.value, one.repeats) for one in read_results(path)] == [("seconds to wake", 2.0, 1)]
    results.add("seconds to wake", "s", [4.0])
    results.add("rate", "tok/s", [1234.5])
    assert "1234.5 tok/s" in capsys.readouterr().out
    found = {one.metric: (one.value, one.low, one.high, one.repeats) for one in read_results(path)}
    assert found == {"seconds to wake": (3.0, 2.0, 4.0, 2), "rate": (1234.0, 1234.0, 1234.0, 1)}


def test_an_item_that_would_end_too_late_does_not_begin() -> None:
    now, durations, begun = [0.0], {"slow": 40.0, "fast": 10.0}, []
    deadline = Deadline.after(105.0, lambda: now[0])
    for item in within_time(["slow", "fast"] * 3, deadline, reserve_s=5.0):
        begun.append(item)
        now[0] += durations[item]
    # The second slow one ends at 90; the second fast one, at 100, just leaves the reserve.
    assert begun == ["slow", "fast", "slow", "fast"]
    assert deadline.left_s == 5.0


def test_an_item_not_seen_before_is_taken_for_as_slow_as_the_slowest() -> None:
    now, begun = [0.0], []
    for item in within_time([1, 2, 3], Deadline.after(50.0, lambda: now[0]), reserve_s=0.0):
        begun.append(item)
        now[0] += 20.0
    assert begun == [1, 2]
