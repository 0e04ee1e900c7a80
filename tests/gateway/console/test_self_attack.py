"""The report of the last self-attack as metrics, and as the console shows it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.console.self_attack import MAX_SERIES, SelfAttack, SelfAttackMetrics
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    from pathlib import Path

RUN = {
    "metric": "run",
    "every_s": 21600.0,
    "started_unix_s": 1000.0,
    "finished_unix_s": 1090.0,
    "requests": 290,
    "error": None,
    "command": "pando attack",
}


def finding(metric: str, verdict: str, **fields: object) -> dict[str, object]:
    return {"label": "user_aware", "metric": metric, "verdict": verdict, **fields}


def metrics_of(path: Path | None) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(SelfAttackMetrics(SelfAttack(path)))
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.removeprefix("pando_gateway_attack_"): float(value) for name, _, value in pairs}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attack.json"


def test_verdicts_and_the_run_are_metrics(path: Path) -> None:
    path.write_text(
        json.dumps(
            [
                finding("cached_tokens", "closed"),
                finding("names", "leaks"),
                finding("control", "leaks", control=True),
                finding("blind", "closed", control=True),
                {"label": "user_aware", "metric": "unfinished", "oracles": ["pages"]},
                RUN,
            ]
        )
    )
    assert metrics_of(path) == {
        "report_readable": 1,
        'findings{mode="user_aware",oracle="cached_tokens",verdict="closed"}': 1,
        'findings{mode="user_aware",oracle="names",verdict="leaks"}': 1,
        "blind_controls": 1,
        "last_run_timestamp_seconds": 1090,
        "interval_seconds": 21600,
        "requests": 290,
        "failed": 0,
    }


def test_a_run_that_failed_keeps_the_age_of_the_last_complete_one(path: Path) -> None:
    path.write_text(json.dumps([{**RUN, "error": "the budget is spent"}]))
    assert metrics_of(path)["failed"] == 1
    assert metrics_of(path)["last_run_timestamp_seconds"] == 1090
    path.write_text(json.dumps([{**RUN, "finished_unix_s": None}]))
    assert metrics_of(path)["last_run_timestamp_seconds"] == 0


def test_the_age_of_a_report_without_a_schedule_is_that_of_its_file(path: Path) -> None:
    path.write_text(json.dumps([finding("names", "closed")]))
    os.utime(path, (500, 500))
    metrics = metrics_of(path)
    assert metrics["last_run_timestamp_seconds"] == 500
    assert "interval_seconds" not in metrics


@pytest.mark.parametrize("text", [None, "{", "7", "[7]", '[{"metric": "run", "every_s": "6h"}]'])
def test_a_report_that_cannot_be_read_is_a_metric(text: str | None, path: Path) -> None:
    if text is not None:
        path.write_text(text)
    assert metrics_of(path) == {"report_readable": 0}


def test_without_a_report_there_are_no_metrics() -> None:
    assert metrics_of(None) == {}


def test_the_number_of_series_is_bounded(path: Path) -> None:
    path.write_text(json.dumps([finding(f"oracle {number}", "closed") for number in range(2 * MAX_SERIES)]))
    assert sum(name.startswith("findings") for name in metrics_of(path)) == MAX_SERIES


@pytest.fixture
def failed(path: Path) -> Path:
    path.write_text(json.dumps([finding("names", "closed"), {**RUN, "error": "no server answers"}]))
    return path


async def test_the_console_has_the_run_and_an_alert_if_it_failed(failed: Path) -> None:
    gateway = gateway_saying("x", console={"attack_report": failed})
    fleet: dict[str, Any] = (await gateway.get("/console/fleet")).json()
    shown = {name: value for name, value in RUN.items() if name not in ("metric", "command")}
    assert fleet["attack"]["run"] == shown | {"error": "no server answers"}
    assert [each["metric"] for each in fleet["attack"]["findings"]] == ["names"]
    [alert] = [each for each in fleet["alerts"] if each["about"] == "attack"]
    assert alert["severity"] == "warning"
    assert "did not come to its end: no server answers" in alert["text"]
