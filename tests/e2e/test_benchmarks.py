"""The benchmarks that start a deployment of their own, small, with a worker that computes nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from deploy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

FAKE = ["--set", "model.load_format=fake"]


def test_offline_gets_every_token_that_the_workload_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    part = ["--requests", "24", "--scale", "0.2", "--repeats", "2", "--json", str(path)]
    assert main(["bench", "offline", "--launch", *FAKE, *part]) == 0
    assert "output tokens/s" in capsys.readouterr().out
    entries = {entry["metric"]: entry for entry in json.loads(path.read_text())}
    assert {entry["benchmark"] for entry in entries.values()} == {"w1-part"}
    assert {entry["model"] for entry in entries.values()} == {"smollm2-135m-instruct (fake)"}
    assert entries["output_throughput"]["repeats"] == 2
    assert entries["output_throughput"]["value"] > 0


@pytest.mark.soak
def test_control_plane_measures_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    assert main(["bench", "control-plane", "--rows", "16", "--repeats", "1", "--json", str(path)]) == 0
    assert "from disconnect to free pages" in capsys.readouterr().out
    values = {entry["metric"]: entry["value"] for entry in json.loads(path.read_text())}
    expected = {"scheduler_step_cpu", "pipeline_output_per_core", "added_ttft", "abort", "memory_per_request"}
    assert expected <= values.keys()
    assert all(values[metric] > 0 for metric in expected)


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_tenants_measures_several_modes_and_compares_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    small = ["--rounds", "1", "--users", "8", "--modes", "isolated", "user_aware", "--sharing-seconds", "0.5"]
    assert main(["bench", "tenants", *FAKE, *small, "--json", str(path)]) == 0
    assert "request_throughput / isolated" in capsys.readouterr().out
    found = {(entry["label"], entry["metric"]): entry["value"] for entry in json.loads(path.read_text())}
    # Eight users of two apps, each twice: alone, half of the prompts are new; with evidence, nobody's are.
    assert found["isolated, warm", "cached_share"] == pytest.approx(0.46, abs=0.03)
    assert found["user_aware, warm", "cached_share"] == pytest.approx(0.91, abs=0.03)
