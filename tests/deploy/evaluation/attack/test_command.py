"""The command as a user calls it, against a fake server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from deploy.cli import main
from deploy.evaluation.attack import campaign
from deploy.evaluation.attack.command import ORACLES
from deploy.evaluation.attack.runs import EXACT_ORACLES
from tests.deploy.evaluation.attack.conftest import CachingServer
from tests.fakes.openai_server import free_url, running_server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.openai_server import FakeOpenAIServer

SOON = ["--epoch-seconds", "0.1", "--quick", "--text-tokens", "64"]


def test_a_server_that_isolates_users_gets_the_verdict_closed(
    caching_server: CachingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "attack.json"
    oracles = ["--oracles", "pairs", "sybils", "boundary", "names", "flood", "--capacity-tokens", "1000"]
    arguments = ["--url", caching_server.url, "--modes", "isolated", *oracles, *SOON, "--json", str(path)]
    assert main(["attack", *arguments, "--api-key", "sk-1"]) == 0
    assert "closed" in capsys.readouterr().out
    assert "sk-1" not in path.read_text()
    entries = {entry["metric"]: entry for entry in json.loads(path.read_text())}
    assert entries["spoofed user id"]["verdict"] == "closed"
    assert entries["spoofed user id"]["value"] == 0.5
    assert {entry["label"] for entry in entries.values()} == {"isolated"}
    assert entries.pop("flood")["verdict"] == "bounded"
    assert {entry["verdict"] for entry in entries.values()} == {"closed"}
    named = [body.get("user") for body in caching_server.bodies]
    assert "" in named
    assert None in named
    assert any("x-pando-tenant" in headers for headers in caching_server.headers)


def test_a_server_that_shares_gets_the_verdict_leaks(
    caching_server: CachingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caching_server.is_shared = True
    path = tmp_path / "attack.json"
    oracles = ["--oracles", "pairs", "sybils", "boundary", "names"]
    flags = ["--url", caching_server.url, "--modes", "shared", *oracles, *SOON, "--json", str(path)]
    assert main(["attack", *flags]) == 0
    assert {entry["verdict"] for entry in json.loads(path.read_text())} == {"leaks"}
    # The same of a server that says it keeps users apart is what the exit status is for.
    assert main(["attack", *flags, "--modes", "isolated"]) == 1
    assert "isolated: cached_tokens: leaks" in capsys.readouterr().out


def test_one_name_that_opens_a_view_is_a_leak(
    caching_server: CachingServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = CachingServer._usage

    def salted(self: CachingServer, body: dict[str, Any], count: int) -> dict[str, Any]:
        return usage(self, {**body, "user": body.get("cache_salt") or body.get("user")}, count)

    monkeypatch.setattr(CachingServer, "_usage", salted)
    assert main(["attack", "--url", caching_server.url, "--modes", "isolated", "--oracles", "names", *SOON]) == 1
    assert "1 of 11 disguises see it" in capsys.readouterr().out


def test_an_attack_that_finds_no_leak_in_shared_mode_fails(
    caching_server: CachingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", caching_server.url, "--modes", "shared", "--oracles", "pairs", *SOON]
    assert main(["attack", *flags]) == 1
    assert "proves nothing" in capsys.readouterr().out


def test_oracles_do_not_apply_to_a_server_that_reports_no_usage(
    server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.listed = ["no-usage"]
    assert main(["attack", "--url", server.url, "--oracles", "sybils", "flood", *SOON]) == 0
    assert capsys.readouterr().out.count("not applicable") == 2


def test_it_is_an_error_if_nothing_becomes_public(
    caching_server: CachingServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.evaluation.attack.scene.PATIENCE_S", 0.3)
    assert main(["attack", "--url", caching_server.url, "--modes", "user_aware", "--oracles", "sybils", *SOON]) == 2
    assert "does not become public" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--modes", "shared", "isolated"], "one mode"), (["--modes", "shared"], "no server answers")],
)
def test_an_impossible_attack_is_explained(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "--url", free_url(), *flags]) == 2
    assert message in capsys.readouterr().err


def test_every_oracle_can_be_chosen() -> None:
    assert list(ORACLES) == list(campaign.ORACLES)
    assert set(EXACT_ORACLES) < set(ORACLES)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["attack", "--url", free_url()]) == 2
    assert "make install-dev" in capsys.readouterr().err


@pytest.mark.parametrize(("is_shared", "verdict"), [(False, "closed"), (True, "leaks")])
def test_a_second_server_shows_whether_stored_pages_leak(
    caching_server: CachingServer, tmp_path: Path, *, is_shared: bool, verdict: str
) -> None:
    sibling = CachingServer(is_shared=is_shared, asked=caching_server.asked)
    caching_server.is_shared = is_shared
    path = tmp_path / "attack.json"
    flags = ["--oracles", "storage", *SOON, "--json", str(path)]
    with running_server(sibling):
        main(["attack", "--url", caching_server.url, "--sibling-url", sibling.url, *flags])
    (entry,) = json.loads(path.read_text())
    assert entry["verdict"] == verdict
    assert "owners find 4 of 4" in entry["note"]


def test_the_storage_oracle_does_not_apply_if_storage_returns_nothing(
    caching_server: CachingServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.evaluation.attack.oracles.storage.STORED_POLL_S", 0)
    with running_server(CachingServer()) as sibling:
        flags = ["--sibling-url", sibling.url, "--oracles", "storage", *SOON]
        assert main(["attack", "--url", caching_server.url, *flags]) == 0
    assert "not applicable" in capsys.readouterr().out
