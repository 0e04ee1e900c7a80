"""Each oracle against a server that keeps a rule, and against one that breaks it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from deploy.cli import main
from deploy.evaluation.attack.findings import OracleVerdict
from deploy.evaluation.attack.oracles.pages import counts
from deploy.evaluation.attack.oracles.storage import Outcome, judge_forgeries
from deploy.evaluation.attack.prober import ProbeAnswer
from deploy.evaluation.bench.clock import SystemClock
from tests.deploy.evaluation.attack.aware_server import EPOCH_S, FLAGS, HOSTILE_S, AwareServer
from tests.fakes.openai_server import running_server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

MODE = ["--modes", "user_aware", "--epoch-seconds", str(EPOCH_S), "--text-tokens", "64", "--seed", "3"]
BAD = ("leaks", "unbounded")


def attack(server: AwareServer, path: Path, oracle: str, *flags: str, quick: bool = True) -> dict[str, dict[str, Any]]:
    """Return entries by oracle; the exit status must say the same as they do."""
    path = path / "attack.json"
    with running_server(server):
        given = ["--url", server.url, *MODE, "--oracles", oracle, "--json", str(path), *flags]
        status = main(["attack", *given, *(["--quick"] if quick else [])])
    entries = {entry["metric"]: entry for entry in json.loads(path.read_text())}
    is_bad = any((entry["verdict"] in BAD) != entry.get("control", False) for entry in entries.values())
    assert status == int(is_bad)
    return entries


def verdicts(entries: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: entry["verdict"] for name, entry in entries.items()}


TRIED_ADAPTERS = ("adapter names", "adapter refusal times")
NAMES_CONTROL = "people named by a vouching key (control)"


def test_invented_users_find_no_leak_where_only_vouched_names_are_subjects(tmp_path: Path) -> None:
    found = verdicts(attack(AwareServer(), tmp_path, "inventions", *FLAGS))
    assert found.pop(NAMES_CONTROL) == "leaks"
    assert len(found) == 5
    assert set(found.values()) == {"closed"}


def test_invented_users_find_leaks_where_every_name_is_a_subject(tmp_path: Path) -> None:
    found = attack(AwareServer(believes_names=True), tmp_path, "inventions", *FLAGS)
    assert found["one key: guessing"]["verdict"] == "leaks"
    assert found["one key: publishing"]["verdict"] == "leaks"
    # Conversation keys and no name at all count as well as names do.
    ways = found["one key: publishing"]["note"]
    assert int(ways.split()[0]) > 8, ways
    # A tenant's text goes no further than the tenant, whoever is invented there.
    assert found["rival key: guessing"]["verdict"] == "closed"


def test_evidence_across_tenants_leaks_to_a_rival(tmp_path: Path) -> None:
    found = verdicts(attack(AwareServer(shares_across_tenants=True), tmp_path, "inventions", *FLAGS))
    rival = ("rival key: guessing", "rival key: tenant's shared text", "rival key: publishing")
    assert [found[name] for name in rival] == ["leaks"] * 3
    assert found["one key: guessing"] == found["one key: publishing"] == "closed"


def test_rival_oracles_do_not_apply_without_a_second_key(tmp_path: Path) -> None:
    found = verdicts(attack(AwareServer(), tmp_path, "inventions", "--api-key", "app"))
    assert found["rival key: guessing"] == "not applicable"
    assert found["one key: publishing"] == "closed"


@pytest.mark.parametrize(("believes_names", "verdict"), [(False, "closed"), (True, "leaks")])
def test_clients_without_a_key_are_distinguished_from_named_users(
    tmp_path: Path, *, believes_names: bool, verdict: str
) -> None:
    server = AwareServer(has_keys=False, believes_names=believes_names)
    found = verdicts(attack(server, tmp_path, "keyless", "--no-keys"))
    assert found == {"keyless: guessing": verdict, "keyless: publishing": verdict}


def test_the_keyless_oracle_does_not_apply_to_a_server_that_requires_keys(tmp_path: Path) -> None:
    assert verdicts(attack(AwareServer(), tmp_path, "keyless", *FLAGS)) == {"keyless": "not applicable"}


@pytest.mark.parametrize(("isolates", "verdict"), [(True, "closed"), (False, "leaks")])
def test_sharing_by_a_tenant_that_must_not_share_is_detected(tmp_path: Path, *, isolates: bool, verdict: str) -> None:
    found = verdicts(attack(AwareServer(isolates_tenants=isolates), tmp_path, "isolation", *FLAGS))
    assert found.pop("tenant that shares by evidence (control)") == "leaks"
    assert found == {"tenant that shares nothing": verdict}


@pytest.mark.parametrize(("across", "verdict"), [(False, "closed"), (True, "unbounded")])
def test_an_attack_by_a_rival_that_switches_sharing_off_is_detected(
    tmp_path: Path, *, across: bool, verdict: str
) -> None:
    found = verdicts(attack(AwareServer(shares_across_tenants=across), tmp_path, "demotion", *FLAGS))
    assert found.pop("demotion by the tenant's own people (control)") == "unbounded"
    assert found == {"rival key: demotion": verdict}


@pytest.mark.parametrize(("shares", "verdict"), [(False, "closed"), (True, "leaks")])
def test_drafts_from_anothers_answers_are_detected(tmp_path: Path, *, shares: bool, verdict: str) -> None:
    found = verdicts(attack(AwareServer(drafts=True, shares_drafts=shares), tmp_path, "drafts", *FLAGS))
    assert found.pop("packets of one's own drafted answers (control)") == "leaks"
    assert found == {"packets of drafted answers": verdict}


def test_the_drafts_oracle_does_not_apply_where_nothing_is_drafted(tmp_path: Path) -> None:
    found = verdicts(attack(AwareServer(), tmp_path, "drafts", *FLAGS))
    assert found == {"packets of drafted answers": "not applicable"}


@pytest.mark.parametrize(
    ("shown_by", "leaking"),
    [("", set()), ("status", {"adapter names"}), ("list", {"adapter names"}), ("time", {"adapter refusal times"})],
)
def test_adapters_that_other_tenants_can_see_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_by: str, leaking: set[str]
) -> None:
    server = AwareServer(shows_adapter=shown_by)

    class ServersClock(SystemClock):
        def now(self) -> float:
            return server.worked_s

    monkeypatch.setattr("deploy.evaluation.attack.campaign.SystemClock", ServersClock)
    found = verdicts(attack(server, tmp_path, "adapters", *FLAGS, "--pairs", "20", quick=False))
    assert found.pop("adapter names under an entitled key (control)") == "leaks"
    assert found.pop("adapter refusal times under an entitled key (control)") == "leaks"
    assert {name for name, verdict in found.items() if verdict == "leaks"} == leaking
    assert {name for name, verdict in found.items() if verdict == "closed"} == {*TRIED_ADAPTERS} - leaking


def test_times_of_refusals_without_a_control_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that shows no difference, whatever the server does."""

    class StoppedClock(SystemClock):
        def now(self) -> float:
            return 0.0

    monkeypatch.setattr("deploy.evaluation.attack.campaign.SystemClock", StoppedClock)
    found = verdicts(
        attack(AwareServer(shows_adapter="time"), tmp_path, "adapters", *FLAGS, "--pairs", "20", quick=False)
    )
    assert found["adapter refusal times"] == "closed"
    # The status of the command is 1, as `attack` checks.
    assert found["adapter refusal times under an entitled key (control)"] == "closed"


PICTURES_CONTROL = "one's own picture again (control)"


@pytest.mark.parametrize(
    ("broken", "leaking"),
    [
        ({}, set()),
        ({"knows_by": "name"}, {"pictures of one file name and EXIF id"}),
        ({"knows_by": "EXIF id"}, {"pictures of one file name and EXIF id"}),
        ({"knows_by": "short hash"}, {"pictures of one short hash"}),
    ],
    ids=str,
)
def test_pictures_taken_for_others_are_detected(tmp_path: Path, broken: dict[str, Any], leaking: set[str]) -> None:
    found = verdicts(attack(AwareServer(sees=True, **broken), tmp_path, "images", *FLAGS))
    assert found.pop(PICTURES_CONTROL) == "leaks"
    assert len(found) == 4
    assert {name for name, verdict in found.items() if verdict == "leaks"} == leaking
    assert {verdict for name, verdict in found.items() if name not in leaking} == {"closed"}


@pytest.mark.parametrize(("shares", "verdict"), [(False, "closed"), (True, "leaks")])
def test_pictures_that_all_users_share_are_detected(tmp_path: Path, *, shares: bool, verdict: str) -> None:
    server = AwareServer(sees=True, shares_views=shares)
    found = verdicts(attack(server, tmp_path, "images", *FLAGS))
    assert found["pictures: cached_tokens"] == found["pictures: made-up names"] == verdict
    assert found["pictures of one short hash"] == "closed"


@pytest.mark.parametrize(("shares", "verdict"), [(False, "closed"), (True, "leaks")])
def test_encodings_shared_between_users_are_detected(tmp_path: Path, *, shares: bool, verdict: str) -> None:
    server = AwareServer(sees=True, shares_encodings=shares)
    found = verdicts(attack(server, tmp_path, "images", *FLAGS, "--pairs", "30", quick=False))
    assert found["time of another question about one's own picture (control)"] == "leaks"
    # Times of a busy machine may leave it undecided, but never make it say the opposite.
    assert found["pictures: time of another question"] in {verdict, "undecided"}


def test_the_images_oracle_does_not_apply_to_a_model_without_vision(tmp_path: Path) -> None:
    assert verdicts(attack(AwareServer(), tmp_path, "images", *FLAGS)) == {"pictures: cached_tokens": "not applicable"}


@pytest.mark.parametrize(("evicts", "verdict"), [(False, "bounded"), (True, "unbounded")])
def test_evictions_by_invented_users_are_detected(tmp_path: Path, *, evicts: bool, verdict: str) -> None:
    server = AwareServer(evicts_others=evicts)
    found = verdicts(attack(server, tmp_path, "pushing", *FLAGS, "--capacity-tokens", str(512 * 16)))
    assert found.pop("pushing out by as many real people (control)") == "unbounded"
    assert found == {"made-up names: pushing out": verdict}


@pytest.mark.parametrize(("in_order", "verdict"), [(False, "bounded"), (True, "unbounded")])
def test_a_flood_that_delays_a_victim_is_detected(tmp_path: Path, *, in_order: bool, verdict: str) -> None:
    server = AwareServer(serves_in_order=in_order, step_s=0.03)
    found = verdicts(attack(server, tmp_path, "delay", *FLAGS, "--policy", "fair", "--rows", "1"))
    assert found.pop("delay by as many real people (control)") == "unbounded"
    assert found == {"rival key: delay": verdict}


@pytest.mark.parametrize(("in_order", "verdict"), [(False, "bounded"), (True, "unbounded")])
def test_long_outputs_that_delay_a_victim_are_detected(tmp_path: Path, *, in_order: bool, verdict: str) -> None:
    server = AwareServer(serves_in_order=in_order, step_s=0.004)
    found = verdicts(attack(server, tmp_path, "long-outputs", *FLAGS, "--policy", "fair", "--rows", "1"))
    assert found.pop("long outputs of as many real people (control)") == "unbounded"
    assert found == {"rival key: long outputs": verdict}


def test_the_delay_oracle_does_not_apply_without_fair_shares(tmp_path: Path) -> None:
    assert verdicts(attack(AwareServer(), tmp_path, "delay", *FLAGS)) == {"rival key: delay": "not applicable"}


@pytest.mark.parametrize(("shows", "verdict"), [(False, "closed"), (True, "leaks")])
def test_metrics_pages_that_reveal_single_requests_are_detected(tmp_path: Path, *, shows: bool, verdict: str) -> None:
    found = attack(AwareServer(shows_metrics=shows), tmp_path, "pages", *FLAGS)
    assert found["metrics for an administrator (control)"]["verdict"] == "leaks"
    assert found["metrics"]["verdict"] == verdict
    assert ("tokens_total" in found["metrics"]["note"]) is shows


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (b'a{x="1"} 10.0\n', b'a{x="1"} 1007.0\n', 'a{x="1"}'),
        (b"", b"a 1000\n", "a"),
        (b"a 10.0\n", b"a 11.0\n", ""),
        (b"a 10.0\n", b"a 5010.0\n", ""),
        (b'{"seen": 3}', b'{"seen": 1001, "x": "y"}', "seen"),
        (b'{"seen": 3}', b'{"seen": 3}', ""),
    ],
)
def test_a_counter_that_grows_by_one_request_is_found(before: bytes, after: bytes, shown: str) -> None:
    assert counts(before, after, 997) == shown


@pytest.mark.parametrize(("shares", "verdict"), [(False, "closed"), (True, "leaks")])
def test_grammars_shared_between_scopes_are_detected(tmp_path: Path, *, shares: bool, verdict: str) -> None:
    server = AwareServer(shares_grammars=shares)
    found = verdicts(attack(server, tmp_path, "grammar-times", *FLAGS, "--pairs", "250", quick=False))
    assert found["grammar timing of one's own (control)"] == "leaks"
    # Times of a busy machine may leave it undecided, but never make it say the opposite.
    assert found["grammar timing"] in {verdict, "undecided"}


@pytest.mark.parametrize(("in_order", "verdict"), [(False, "bounded"), (True, "unbounded")])
def test_grammars_that_delay_others_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_order: bool, verdict: str
) -> None:
    monkeypatch.setattr("deploy.evaluation.attack.oracles.grammars.MOST_DELAY_S", HOSTILE_S)
    monkeypatch.setattr("deploy.evaluation.attack.oracles.grammars.AHEAD_S", 0.1)
    found = verdicts(attack(AwareServer(compiles_in_order=in_order), tmp_path, "grammar-delay", *FLAGS))
    assert found.pop("grammar delay by the victim's own (control)") == "unbounded"
    assert found == {"grammar delay": verdict}


@pytest.mark.parametrize(("authenticates", "verdict"), [(True, "closed"), (False, "leaks")])
def test_use_of_unauthenticated_stored_pages_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, authenticates: bool, verdict: str
) -> None:
    monkeypatch.setattr("deploy.evaluation.attack.oracles.storage.QUIET_S", 0.05)
    monkeypatch.setattr("deploy.evaluation.attack.oracles.storage.POLL_S", 0.05)
    folder = tmp_path / "storage"
    folder.mkdir()
    server = AwareServer(storage=folder, authenticates=authenticates)
    with running_server(AwareServer(storage=folder, authenticates=authenticates)) as sibling:
        flags = ["--sibling-url", sibling.url, "--storage", str(folder)]
        found = attack(server, tmp_path, "forgeries", *FLAGS, *flags)
    assert found["forged storage"]["verdict"] == verdict
    if verdict == "leaks":
        assert "flipped" in found["forged storage"]["note"]


def test_a_storage_that_is_never_read_leaves_forgeries_undecided() -> None:
    missed = ProbeAnswer("text", 0)
    outcomes = [Outcome(name, missed, missed) for name in ("untouched", "flipped")]
    assert judge_forgeries(outcomes).verdict is OracleVerdict.UNDECIDED
    outcomes[0] = Outcome("untouched", missed, ProbeAnswer("text", 64))
    assert judge_forgeries(outcomes).verdict is OracleVerdict.CLOSED
    outcomes[1] = Outcome("flipped", missed, ProbeAnswer("another", 0))
    assert judge_forgeries(outcomes).verdict is OracleVerdict.LEAKS
