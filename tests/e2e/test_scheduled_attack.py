"""A scheduled attack on a deployment that serves others: its report in the console, its verdicts in the metrics."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import (
    ConsoleSettings,
    GatewaySettings,
    LimitsSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
)
from deploy.cli import main
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.e2e.conftest import serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.e2e.served import Served

pytestmark = pytest.mark.slow

ROOT = {"authorization": "Bearer root-secret"}
KEYS = (
    ApiKey("root", hash_of("root-secret"), "ops", admin=True),
    ApiKey("canary", hash_of("canary-secret"), "canary", vouches_for_users=True),
    ApiKey("plain", hash_of("plain-secret"), "canary"),
    ApiKey("rival", hash_of("rival-secret"), "canary-rival"),
)
VARIABLES = {
    "PANDO_ATTACK_API_KEY": "canary-secret",
    "PANDO_ATTACK_PLAIN_KEY": "plain-secret",
    "PANDO_ATTACK_RIVAL_KEY": "rival-secret",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scheduled") / "attack.json"


@pytest.fixture(scope="module")
def watched(report: Path, run_root: Path) -> Iterator[Served]:
    save_keys(report.parent / "keys.toml", KEYS)
    (report.parent / "limits.toml").write_text("[tenants.canary]\nweight = 0.01\n")
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(
            port=0, keys_file=report.parent / "keys.toml", console=ConsoleSettings(attack_report=report)
        ),
        scheduler=SchedulerSettings.model_validate({"cache": {"epoch_seconds": 0.5, "promotion_epochs": 1000}}),
        limits=LimitsSettings(file=report.parent / "limits.toml"),
    )
    yield from serve(settings, run_root)


def get(served: Served, path: str) -> httpx.Response:
    with served.http() as http:
        answer = http.get(path, headers=ROOT)
    answer.raise_for_status()
    return answer


def metrics_of(served: Served) -> dict[str, float]:
    text = get(served, "/metrics").text
    found = re.findall(r"^(pando_gateway_attack_\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def attack(served: Served, report: Path, *flags: str) -> int:
    schedule = ["--every", "6h", "--runs", "1", "--epoch-seconds", "0.5", "--max-rate", "500"]
    return main(["attack", "--url", served.url, "--modes", "user_aware", *schedule, *flags, "--json", str(report)])


@pytest.mark.timeout(600)
def test_verdicts_are_in_the_console_and_in_the_metrics(
    watched: Served, report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert metrics_of(watched) == {"pando_gateway_attack_report_readable": 0.0}
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert attack(watched, report) == 0, capsys.readouterr().out
    content = report.read_text()
    assert not any(secret in content for secret in VARIABLES.values())
    shown: dict[str, Any] = get(watched, "/console/fleet").json()["attack"]
    findings = {finding["metric"]: finding for finding in shown["findings"]}
    assert findings["cached_tokens"]["verdict"] == "closed"
    assert findings["Sybil sweep"]["verdict"] == "bounded"
    run = shown["run"]
    assert (run["every_s"], run["error"]) == (6 * 3600, None)
    assert run["started_unix_s"] < run["finished_unix_s"]
    assert 100 < run["requests"] <= 1000
    metrics = metrics_of(watched)
    labels = 'mode="user_aware",oracle="cached_tokens",verdict="closed"'
    assert metrics[f"pando_gateway_attack_findings{{{labels}}}"] == 1
    assert not any("leaks" in name or "unbounded" in name for name in metrics)
    assert metrics["pando_gateway_attack_last_run_timestamp_seconds"] == pytest.approx(run["finished_unix_s"])
    assert metrics["pando_gateway_attack_interval_seconds"] == 6 * 3600
    assert metrics["pando_gateway_attack_requests"] == run["requests"]
    assert metrics["pando_gateway_attack_failed"] == 0

    # A run that spends its budget says so, and the age of the last complete one stays.
    assert attack(watched, report, "--oracles", "pairs", "--max-requests", "9") == 2
    capsys.readouterr()
    metrics = metrics_of(watched)
    assert metrics["pando_gateway_attack_failed"] == 1
    assert metrics["pando_gateway_attack_requests"] == 9
    assert metrics["pando_gateway_attack_last_run_timestamp_seconds"] == pytest.approx(run["finished_unix_s"])
    fleet = get(watched, "/console/fleet").json()
    assert any("the budget of 9 requests is spent" in alert["text"] for alert in fleet["alerts"])
    assert {entry["metric"] for entry in json.loads(report.read_text())} >= {"unfinished", "run"}
