from __future__ import annotations

import json
from typing import TYPE_CHECKING

from deploy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ENTRIES = [
    {"benchmark": "cache-m1-10", "label": "shared", "metric": "hit_rate", "value": 0.5},
    {"benchmark": "cache-m1-10", "label": "user_aware", "metric": "hit_rate", "value": 0.49},
    {
        "benchmark": "cache-costs",
        "label": "shared, 1000 nodes, 100 users",
        "metric": "peek + commit + insert cpu",
        "value": 60,
    },
    {"benchmark": "tenants-s1", "label": "shared, cold", "metric": "request_throughput", "value": 6.5},
    {"benchmark": "tenants-s1", "label": "shared, cold", "metric": "curve_000", "value": 2.0},
    {"benchmark": "tenants-s1", "label": "shared, cold", "metric": "curve_001", "value": 5.0},
    {"benchmark": "attack", "label": "shared", "metric": "cached_tokens", "value": 1.0, "low": 1.0, "high": 1.0},
    {"benchmark": "attack", "label": "shared", "metric": "flood", "verdict": "unbounded"},
    {"benchmark": "w1", "label": None, "metric": "output_throughput", "value": 1.0},
]


def test_a_plot_is_drawn_for_each_kind_of_stored_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ENTRIES))
    assert main(["bench", "plots", str(tmp_path)]) == 0
    names = ["attack.svg", "cache-costs.svg", "cache-m1-10.svg", "tenants-s1.svg"]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == names
    assert "attack.svg" in capsys.readouterr().out
    drawn = {path: path.read_text() for path in tmp_path.glob("*.svg")}
    assert all("<svg" in text for text in drawn.values())
    assert main(["bench", "plots", str(tmp_path)]) == 0
    assert {path: path.read_text() for path in drawn} == drawn


def test_a_file_that_is_not_a_list_of_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert main(["bench", "plots", str(tmp_path)]) == 2
    assert "a.json is not a list" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["bench", "plots"]) == 2
    assert "make install-dev" in capsys.readouterr().err
