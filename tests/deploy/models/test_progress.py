from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from common.models.progress import DownloadState, PeriodicReport
from deploy.models.progress import download_report, size


def test_the_state_is_passed_on_at_both_ends_and_every_interval() -> None:
    states: list[DownloadState] = []
    report = PeriodicReport(states.append, interval_s=1000)
    report.begin("a/b", 3, 100)
    for _ in range(10):
        report.advance(10)
    report.end()
    assert states == [DownloadState("a/b", 3, 0, 100), DownloadState("a/b", 3, 100, 100)]
    states.clear()
    report = PeriodicReport(states.append, interval_s=0)
    report.begin("a/b", 3, 100)
    report.advance(60)
    report.advance(-20)
    assert [state.done for state in states] == [0, 60, 40]


def test_a_terminal_shows_a_bar() -> None:
    written = io.StringIO()
    report = download_report(console=Console(file=written, force_terminal=True, width=120))
    report.begin("a/b", 3, 2_000_000)
    report.advance(2_000_000)
    report.end()
    assert "downloading a/b (3 files)" in written.getvalue()
    assert "2.0/2.0 MB" in written.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_other_output_is_lines(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = download_report(as_json=as_json, console=Console(file=io.StringIO()))
    report.begin("a/b", 3, 2_000_000)
    report.advance(500_000)
    report.end()
    first, last = capsys.readouterr().err.splitlines()
    if as_json:
        assert json.loads(last) == {
            "event": "model.download", "level": "info", "service": "pando", "model": "a/b", "files": 3,
            "done": 500_000, "total": 2_000_000,
        }  # fmt: skip
        assert json.loads(first)["done"] == 0
    else:
        assert (first, last) == (
            "downloading a/b: 0 B of 2.0 MB (0 %)", "downloading a/b: 500 kB of 2.0 MB (25 %)",
        )  # fmt: skip


def test_sizes_are_in_decimal_units() -> None:
    assert [size(count) for count in (0, 999, 8_200, 98_400_000, 269_000_000, 16_381_470_720)] == [
        "0 B", "999 B", "8.2 kB", "98.4 MB", "269 MB", "16.4 GB",
    ]  # fmt: skip
