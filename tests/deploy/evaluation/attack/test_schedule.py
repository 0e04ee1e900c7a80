"""Attacks on a schedule: their budget, their priority, and what the report says about each run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from deploy.cli import main
from deploy.evaluation.attack.allowance import Allowance, Budget, BudgetSpentError
from deploy.evaluation.attack.campaign import AttackReport
from deploy.evaluation.attack.command import ORACLES, duration
from deploy.evaluation.attack.prober import LOWEST_PRIORITY, AttackError
from deploy.evaluation.attack.report import RUN
from deploy.evaluation.attack.runs import EXACT_ORACLES
from deploy.evaluation.attack.schedule import SCHEDULED_ORACLES, AttackRun, Attempt, attack_repeatedly, attempted
from tests.fakes.openai_server import free_url

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.evaluation.attack.conftest import CachingServer

REPORT = AttackReport("isolated", "tiny", ())


class SetClock:
    """Passes when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += max(seconds, 0.0)


def run_of(path: Path) -> dict[str, Any]:
    [run] = [entry for entry in json.loads(path.read_text()) if entry["metric"] == RUN]
    return dict(run)


async def test_requests_are_sent_at_the_budgets_rate_and_not_beyond_it() -> None:
    clock = SetClock()
    allowance = Allowance(Budget(requests=5, per_second=2.0), clock)
    times = []
    for _ in range(5):
        await allowance.take()
        times.append(clock.time)
    assert times == [100.0, 100.5, 101.0, 101.5, 102.0]
    with pytest.raises(BudgetSpentError, match="budget of 5 requests"):
        await allowance.take()
    assert allowance.spent == 5


async def test_time_that_passes_between_requests_is_not_made_up_for() -> None:
    clock = SetClock()
    allowance = Allowance(Budget(requests=5, per_second=1.0), clock)
    await allowance.take()
    clock.time += 60
    for _ in range(2):
        await allowance.take()
    assert clock.time == 161.0


async def test_each_run_is_reported_and_a_failed_one_keeps_the_end_of_the_last_complete_one() -> None:
    outcomes = [Attempt(REPORT, 7), Attempt(None, 3, "no server answers"), Attempt(REPORT, 8)]
    waiting = list(outcomes)
    runs: list[AttackRun] = []

    async def attempt() -> Attempt:
        return waiting.pop(0)

    made = await attack_repeatedly(attempt, runs.append, every_s=0.01, runs=3, last_finished_s=5.0)
    assert made == outcomes
    assert [(run.requests, run.error) for run in runs] == [(7, None), (3, "no server answers"), (8, None)]
    first, failed, last = runs
    assert first.finished_unix_s is not None
    assert failed.finished_unix_s == first.finished_unix_s
    assert last.finished_unix_s is not None
    assert first.started_unix_s <= first.finished_unix_s <= last.started_unix_s <= last.finished_unix_s
    assert all(run.every_s == 0.01 for run in runs)


async def test_a_first_run_that_fails_has_the_end_of_an_earlier_process() -> None:
    runs: list[AttackRun] = []

    async def attack() -> AttackReport:
        raise AttackError("a request failed")

    await attack_repeatedly(lambda: attempted(attack, lambda: 2), runs.append, 1.0, runs=1, last_finished_s=5.0)
    assert [(run.finished_unix_s, run.requests, run.error) for run in runs] == [(5.0, 2, "a request failed")]


def test_a_scheduled_attack_asks_at_the_lowest_priority_within_its_budget(
    caching_server: CachingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "attack.json"
    monkeypatch.setenv("PANDO_ATTACK_API_KEY", "sk-canary")
    flags = ["--url", caching_server.url, "--modes", "isolated", "--oracles", "pairs", "--every", "0.1s"]
    assert main(["attack", *flags, "--runs", "2", "--max-rate", "1000", "--json", str(path)]) == 0
    run = run_of(path)
    assert (run["error"], run["every_s"]) == (None, 0.1)
    asked = [body for body in caching_server.bodies if "priority" in body]
    assert {body["priority"] for body in asked} == {LOWEST_PRIORITY}
    assert len(asked) == 2 * run["requests"]
    assert any(headers.get("authorization") == "Bearer sk-canary" for headers in caching_server.headers)
    assert "sk-canary" not in path.read_text()
    # Other texts in each run, as those of an earlier one may still be cached.
    prompts = [tuple(body["prompt"]) for body in asked]
    assert not set(prompts[: len(prompts) // 2]) & set(prompts[len(prompts) // 2 :])
    assert (
        main(["attack", *flags, "--runs", "1", "--max-requests", "4", "--max-rate", "1000", "--json", str(path)]) == 2
    )
    later = run_of(path)
    assert (later["requests"], later["finished_unix_s"]) == (4, run["finished_unix_s"])
    assert "budget of 4" in later["error"]


def test_leaks_are_the_exit_status_of_a_limited_number_of_runs(caching_server: CachingServer, tmp_path: Path) -> None:
    caching_server.is_shared = True
    flags = ["--url", caching_server.url, "--modes", "isolated", "--oracles", "pairs", "--every", "1h", "--runs", "1"]
    assert main(["attack", *flags, "--max-rate", "1000", "--json", str(tmp_path / "attack.json")]) == 1


def test_a_server_that_is_away_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    assert main(["attack", "--url", free_url(), "--every", "1h", "--runs", "1", "--json", str(path)]) == 2
    run = run_of(path)
    assert run["finished_unix_s"] is None
    assert "no server answers" in run["error"]


@pytest.mark.parametrize("flags", [["--launch"], ["--url", "http://127.0.0.1:9"]])
def test_a_schedule_needs_a_running_server_and_a_file(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", *flags, "--every", "6h"]) == 2
    assert "--every requires --url and --json" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800.0), ("6h", 21600.0), ("1d", 86400.0), ("0.5s", 0.5)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["6", "h", "-1h", "0h", "6w", ""])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        main(["attack", "--url", "http://127.0.0.1:9", "--every", text])


def test_scheduled_oracles_are_exact_ones() -> None:
    assert set(SCHEDULED_ORACLES) < set(EXACT_ORACLES) < set(ORACLES)
