"""A file of findings is complete after each oracle, and a later run adds what it lacks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from deploy.cli import main
from deploy.evaluation.attack import campaign, runs
from deploy.evaluation.attack.campaign import AttackReport
from deploy.evaluation.attack.findings import Finding, OracleVerdict
from deploy.evaluation.attack.report import UNFINISHED, FindingsFile
from deploy.evaluation.bench.results import Provenance

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.evaluation.attack.scene import Scene
    from tests.deploy.evaluation.attack.conftest import CachingServer

OLD = Provenance("pando attack", "0ld", "2026-01-01")
NEW = Provenance("pando attack --oracles flood", "11ew", "2026-02-02")


def report(verdict: OracleVerdict, *oracles: str, mode: str = "user_aware", model: str = "tiny") -> AttackReport:
    return AttackReport(mode, model, tuple(Finding(oracle, verdict) for oracle in oracles))


def entries(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    assert isinstance(found, list)
    return found


def shown(path: Path) -> list[tuple[str, str, str, str]]:
    done = [entry for entry in entries(path) if entry["metric"] != UNFINISHED]
    return [(entry["label"], entry["metric"], entry["verdict"], entry["commit"]) for entry in done]


def unfinished(path: Path) -> dict[str, list[str]]:
    return {entry["label"]: entry["oracles"] for entry in entries(path) if entry["metric"] == UNFINISHED}


def test_findings_are_in_the_file_after_each_oracle(tmp_path: Path) -> None:
    path = tmp_path / "new" / "attack.json"
    file = FindingsFile(path, OLD, {"shared": ["pairs"], "user_aware": ["pairs", "pages", "flood"]})
    assert unfinished(path) == {"shared": ["pairs"], "user_aware": ["pairs", "pages", "flood"]}
    file.add("pairs", report(OracleVerdict.LEAKS, "cached_tokens", "time to first token", mode="shared"))
    file.add("pages", report(OracleVerdict.CLOSED, "metrics"))
    assert shown(path) == [
        ("shared", "cached_tokens", "leaks", "0ld"),
        ("shared", "time to first token", "leaks", "0ld"),
        ("user_aware", "metrics", "closed", "0ld"),
    ]
    assert unfinished(path) == {"user_aware": ["pairs", "flood"]}
    assert [each.name for each in path.parent.iterdir()] == ["attack.json"]


def test_a_later_run_replaces_only_the_oracles_that_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    first = FindingsFile(path, OLD, {"user_aware": ["pairs", "flood", "pages"]})
    first.add("pairs", report(OracleVerdict.UNDECIDED, "cached_tokens", "time to first token"))
    first.add("flood", report(OracleVerdict.BOUNDED, "flood"))
    second = FindingsFile(path, NEW, {"user_aware": ["pairs"]})
    # Until an oracle is at its end, what it found before stays.
    assert len(shown(path)) == 3
    assert unfinished(path) == {"user_aware": ["pages", "pairs"]}
    # An oracle that does not apply any more leaves nothing of what it once found.
    second.add("pairs", report(OracleVerdict.CLOSED, "cached_tokens"))
    expected = [("user_aware", "flood", "bounded", "0ld"), ("user_aware", "cached_tokens", "closed", "11ew")]
    assert shown(path) == expected
    assert unfinished(path) == {"user_aware": ["pages"]}
    second.add("pages", report(OracleVerdict.CLOSED, "metrics", model="another"))
    second.add("pairs", report(OracleVerdict.LEAKS, "cached_tokens", model="another"))
    assert shown(path)[:2] == expected
    assert len(shown(path)) == 4
    assert unfinished(path) == {}


def test_a_file_of_something_else_is_refused_before_the_attack(
    caching_server: CachingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"mine": 1}')
    assert main(["attack", "--url", caching_server.url, "--oracles", "pairs", "--json", str(path)]) == 2
    assert "not a list of results" in capsys.readouterr().err
    assert path.read_text() == '{"mine": 1}'
    assert caching_server.bodies == []


def test_an_interrupted_attack_keeps_what_it_found_and_a_second_one_completes_it(
    caching_server: CachingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "attack.json"
    flags = ["--url", caching_server.url, "--modes", "isolated", "--quick", "--json", str(path)]

    async def interrupted(_scene: Scene) -> list[Finding]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(campaign.ORACLES, "names", interrupted)
        assert main(["attack", *flags, "--oracles", "pairs", "names", "pages"]) == 130
    assert [entry[1] for entry in shown(path)] == ["cached_tokens"]
    assert unfinished(path) == {"isolated": ["names", "pages"]}
    assert main(["attack", *flags, "--oracles", *unfinished(path)["isolated"]]) == 0
    assert [entry[1] for entry in shown(path)] == ["cached_tokens", "absent user id", "spoofed user id", "metrics"]
    assert unfinished(path) == {}


def test_no_key_is_written_to_the_file(caching_server: CachingServer, tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    keys = ("api", "plain", "personal", "rival", "rival-vouching", "third", "isolated", "admin")
    given = [part for name in keys for part in (f"--{name}-key", f"sk-{name}")]
    flags = ["--url", caching_server.url, "--oracles", "pairs", "--quick", *given, "--json", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pando", "attack", *flags])
        main(["attack", *flags])
    assert "sk-" not in path.read_text()
    assert entries(path)[0]["command"].count("***") == len(keys)


def test_each_mode_plans_the_oracles_that_depend_on_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned: dict[str, list[str]] = {}
    run: list[tuple[str, str]] = []

    def attacked(launch: Any, plan: Any, _servers: int, observer: Any) -> AttackReport:
        for oracle in plan.oracles:
            observer.found(oracle, report(OracleVerdict.CLOSED, oracle, mode=launch.mode))
        return report(OracleVerdict.CLOSED, *plan.oracles, mode=launch.mode)

    class Recording(FindingsFile):
        def __init__(self, path: Path, provenance: Provenance, planned_oracles: Any) -> None:
            planned.update(planned_oracles)
            super().__init__(path, provenance, planned_oracles)

        def add(self, oracle: str, found: AttackReport) -> None:
            run.append((found.mode, oracle))
            super().add(oracle, found)

    monkeypatch.setattr(runs, "_attack_launch", attacked)
    monkeypatch.setattr("deploy.evaluation.attack.report.FindingsFile", Recording)
    path = tmp_path / "attack.json"
    main(["attack", "--launch", "--modes", "shared", "user_aware", "--json", str(path)])
    assert set(planned) == {"shared", "user_aware"}
    assert sorted(run) == sorted((mode, oracle) for mode, oracles in planned.items() for oracle in oracles)
    assert set(planned["user_aware"]) - set(planned["shared"]) == {
        *runs.MODE_INDEPENDENT,
        "sybils, k = 2",
        "sybils, k = 4",
    }
    assert unfinished(path) == {}
