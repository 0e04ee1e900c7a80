"""The attack harness against real servers: what is shared leaks, what is user-aware does not."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from deploy.cli import main
from deploy.evaluation.attack.campaign import Plan, attack
from deploy.evaluation.attack.findings import OracleVerdict
from deploy.evaluation.attack.runs import FAIR, Launch, launched
from deploy.evaluation.attack.runs import NO_MODEL as NO_MODEL_SETTINGS
from deploy.evaluation.attack.scene import QUICK
from tests.e2e.conftest import fake_steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deploy.evaluation.attack.campaign import AttackReport


class Unobserved:
    def progress(self, line: str) -> None:
        pass

    def found(self, oracle: str, report: AttackReport) -> None:
        pass


# Steps long enough that a queue forms and its order can be seen.
STEP_MS = 20.0
NO_MODEL = ["--set", "model.load_format=fake"]


@pytest.fixture(autouse=True)
def slow_steps() -> Iterator[None]:
    with fake_steps(STEP_MS):
        yield


ORACLES = ("pairs", "order", "sybils", "boundary", "revocation", "names")
INVENTIONS = ("inventions", "keyless", "isolation", "demotion", "pages", "delay", "long-outputs", "pushing")


def verdicts(path: Path) -> dict[tuple[str, str], str]:
    return {(entry["label"], entry["metric"]): entry["verdict"] for entry in json.loads(path.read_text())}


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_exact_oracles_find_leaks_in_the_shared_cache_only(tmp_path: Path) -> None:
    def attacked(mode: str) -> dict[tuple[str, str], str]:
        path = tmp_path / f"{mode}.json"
        # The order in which equals happen to be served says something once in forty times: the same one each time.
        flags = ["--modes", mode, "--oracles", *ORACLES, "--thresholds", "--seed", "7", "--json", str(path)]
        assert main(["attack", "--launch", "--quick", *NO_MODEL, *flags]) == 0
        return verdicts(path)

    # Each of them mostly waits for epochs to end.
    with ThreadPoolExecutor(2) as pool:
        shared, aware = pool.map(attacked, ("shared", "user_aware"))
    found = shared | aware
    oracles = ("cached_tokens", "serving order (PromptPeek)", "epoch boundary", "absent user id", "spoofed user id")
    assert {oracle: found["shared", oracle] for oracle in oracles} == dict.fromkeys(oracles, "leaks")
    exact = [oracle for oracle in oracles if "order" not in oracle]
    assert {oracle: found["user_aware", oracle] for oracle in exact} == dict.fromkeys(exact, "closed")
    # An order among equals is chance; a busy machine may leave it undecided, but never make it tell.
    assert found["user_aware", "serving order (PromptPeek)"] in ("closed", "undecided")
    assert found["shared", "Sybil sweep"] == "leaks"
    assert found["user_aware", "Sybil sweep"] == "bounded"
    assert found["user_aware", "revocation"] in ("bounded", "undecided")


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_invented_users_find_leaks_in_the_shared_cache_only(tmp_path: Path) -> None:
    def attacked(mode: str) -> dict[str, dict[str, Any]]:
        path = tmp_path / f"{mode}.json"
        flags = ["--modes", mode, "--oracles", *INVENTIONS, "--thresholds", "--seed", "7", "--json", str(path)]
        assert main(["attack", "--launch", "--quick", "--set", "model.load_format=fake", *flags]) == 0
        return {entry["metric"]: entry for entry in json.loads(path.read_text())}

    with ThreadPoolExecutor(2) as pool:
        shared, aware = pool.map(attacked, ("shared", "user_aware"))
    guesses = [f"{who}: {what}" for who in ("rival key", "one key", "keyless") for what in ("guessing", "publishing")]
    guesses += ["rival key: tenant's shared text", "tenant that shares nothing"]
    assert {oracle: shared[oracle]["verdict"] for oracle in guesses} == dict.fromkeys(guesses, "leaks")
    assert {oracle: aware[oracle]["verdict"] for oracle in guesses} == dict.fromkeys(guesses, "closed")
    assert shared["made-up names: pushing out"]["verdict"] == "unbounded"
    assert aware["made-up names: pushing out"]["verdict"] == "bounded"
    assert "624 tokens" in aware["made-up names: pushing out"]["note"]
    assert aware["rival key: demotion"]["verdict"] == "closed"
    assert aware["rival key: delay"]["verdict"] == "bounded"
    assert aware["rival key: long outputs"]["verdict"] == "bounded"
    assert aware["metrics"]["verdict"] == "closed"
    controls = [entry for entry in aware.values() if entry.get("control")]
    assert len(controls) == 7
    assert {entry["verdict"] for entry in controls} <= {"leaks", "unbounded"}


@pytest.mark.extended
def test_packets_of_drafted_answers_show_others_answers_in_the_shared_cache_only(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    flags = ["--modes", "shared", "user_aware", "--oracles", "drafts", "--thresholds", "--json", str(path)]
    assert main(["attack", "--launch", "--quick", "--set", "model.load_format=fake", *flags]) == 0
    found = verdicts(path)
    oracle = "packets of drafted answers"
    assert found["shared", oracle] == "leaks"
    # A busy machine may bring tokens late, and then several in one packet.
    assert found["user_aware", oracle] in ("closed", "undecided")
    assert found["user_aware", "packets of one's own drafted answers (control)"] == "leaks"


@pytest.mark.extended
def test_pictures_are_found_by_others_in_the_shared_cache_only(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    flags = ["--modes", "shared", "user_aware", "--oracles", "images", "--thresholds", "--json", str(path)]
    assert main(["attack", "--launch", "--quick", *flags]) == 0
    found = verdicts(path)
    for oracle in ("pictures: cached_tokens", "pictures: made-up names"):
        assert (found["shared", oracle], found["user_aware", oracle]) == ("leaks", "closed")
    for mode in ("shared", "user_aware"):
        assert found[mode, "pictures of one file name and EXIF id"] == "closed"
        assert found[mode, "pictures of one short hash"] == "closed"
        assert found[mode, "one's own picture again (control)"] == "leaks"


@pytest.mark.extended
def test_forged_pages_in_storage_are_misses(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    flags = ["--modes", "user_aware", "--oracles", "forgeries", "--thresholds", "--json", str(path)]
    assert main(["attack", "--launch", "--quick", "--set", "model.load_format=fake", *flags]) == 0
    (entry,) = json.loads(path.read_text())
    assert entry["verdict"] == "closed"
    assert "untouched pages 64 tokens" in entry["note"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_oracles_confirm_the_claims_about_every_mode(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    assert main(["attack", "--launch", "--json", str(path)]) == 0
    found = verdicts(path)
    private = (
        "cached_tokens",
        "time to first token",
        "serving order (PromptPeek)",
        "in-batch duplicates",
        "rival key: time to first token",
    )
    assert {oracle: found["shared", oracle] for oracle in private} == dict.fromkeys(private, "leaks")
    for mode in ("isolated", "isolated_pinned", "user_aware"):
        assert {oracle: found[mode, oracle] for oracle in private} == dict.fromkeys(private, "closed")


@pytest.mark.extended
def test_the_oracle_detects_long_outputs_that_delay_a_victim_without_fair_shares() -> None:
    """The oracle's own control: what it finds closed under fair shares is open when requests are served by arrival."""
    settings = (*NO_MODEL_SETTINGS, *(each.replace("policy=fair", "policy=fcfs") for each in FAIR))
    with launched(Launch(mode="user_aware", settings=settings)) as up:
        assert up.server.policy == "fcfs"
        claimed = replace(up.server, policy="fair")
        plan = Plan(("long-outputs",), QUICK, text_tokens=64, seed=7)
        report = asyncio.run(attack(up.url, up.api_key, claimed, plan, Unobserved()))
    assert [finding.verdict for finding in report.findings] == [OracleVerdict.UNBOUNDED] * 2
