from __future__ import annotations

import json
from typing import TYPE_CHECKING

from deploy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_several_modes_are_simulated_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cache.json"
    small = ["--requests", "600", "--users", "60", "--apps", "4", "--scale", "0.1", "--device-pages", "2000"]
    modes = ["--modes", "shared", "user_aware"]
    assert main(["bench", "cache", *small, *modes, "--json", str(path)]) == 0
    assert "hit tokens of shared's" in capsys.readouterr().out
    found = {(entry["label"], entry["metric"]): entry["value"] for entry in json.loads(path.read_text())}
    assert found["user_aware", "crossing_tokens"] == 0
    assert found["shared", "crossing_tokens"] > 0
    assert 0.5 < found["user_aware", "hits_of_shared"] <= 1.1
    assert found["user_aware", "promotions"] > 0
    assert found["user_aware", "insert_p50"] > 0


def test_a_trace_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    assert main(["bench", "trace", str(trace), "--requests", "200", "--users", "20", "--apps", "2"]) == 0
    flags = ["--trace", str(trace), "--modes", "isolated", "--requests", "200", "--jobs", "1"]
    assert main(["bench", "cache", *flags]) == 0
    assert "t-200-requests" in capsys.readouterr().out


def test_a_missing_trace_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--trace", "/does/not/exist", "--modes", "shared", "--jobs", "1"]) == 2
    assert "exist" in capsys.readouterr().err
