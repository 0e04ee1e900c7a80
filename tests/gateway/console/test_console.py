"""The console's routes: what anyone may load, what only administrators may, and what the pages are told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gateway.console.alerts import alerts
from gateway.console.console import MAX_WATCHERS, Console
from gateway.console.self_attack import SelfAttack
from gateway.pipeline.port import CacheChanges
from tests.gateway.support import FakedGateway, error_of, events, faked

if TYPE_CHECKING:
    from pathlib import Path

GROUP: dict[str, Any] = {
    "group": "unix:/run/s.sock",
    "worker_group": "READY",
    "paused": False,
    "leaked_pages": "0",
    "waiting_requests": 0,
    "max_rows": 8,
    "tiers": [{"tier": "device", "capacity_pages": "100", "protected_pages": "10"}],
    "requests": [{"view": {"subject": {"tenant": "acme", "name": "user/ann"}}}],
    "owners": [{"tenant": "zeta", "fingerprint": "ab"}],
}
DATA = ("/console/about", "/console/fleet", "/console/grove")


def gateway_of(*groups: dict[str, Any], changes: list[CacheChanges] | None = None, **settings: Any) -> FakedGateway:
    gateway = faked(None, **settings)
    gateway.administration.detailed = list(groups)
    gateway.administration.changes = changes or []
    return gateway


async def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script() -> None:
    page = await gateway_of().get("/console")
    assert page.status_code == 200
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["img-src"] == "'self' blob:"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "://" not in page.text
    assert "<script>" not in page.text


async def test_files_are_sent_once_until_they_change() -> None:
    gateway = gateway_of()
    first = await gateway.get("/console/static/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = await gateway.get("/console/static/main.js", {"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["../route.py", "%2e%2e/route.py", "nothing.js", "vendor/README.md", ""])
async def test_nothing_but_the_consoles_files_is_served(name: str) -> None:
    assert (await gateway_of().get(f"/console/static/{name}")).status_code == 404


async def test_the_console_can_be_switched_off() -> None:
    gateway = gateway_of(console={"enabled": False})
    for path in ("/console", "/console/static/main.js", *DATA):
        error_of(await gateway.get(path), 404)


@pytest.mark.parametrize("path", DATA[1:])
async def test_data_of_others_needs_an_administrator(path: str) -> None:
    gateway = gateway_of(GROUP)
    gateway.peer = "192.0.2.7"
    error_of(await gateway.get(path), 403)
    page_elsewhere = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    local = gateway_of(GROUP)
    error_of(await local.get(path, page_elsewhere), 403)
    assert (await local.get(path)).status_code == 200


@pytest.mark.parametrize("path", DATA)
async def test_with_keys_no_data_is_sent_without_one(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    error_of(await gateway_of(GROUP, keys_file=keys).get(path), 401)


async def test_callers_learn_who_they_are() -> None:
    about = (await gateway_of().get("/console/about")).json()
    assert (about["tenant"], about["subject"], about["is_admin"]) == ("default", "local", True)
    assert [model["name"] for model in about["models"]] == ["tiny"]


async def test_adapters_are_named_as_requests_name_them() -> None:
    gateway = gateway_of()
    await gateway.administration.load_adapter("botany", "somewhere", pinned=False)
    [model] = (await gateway.get("/console/about")).json()["models"]
    assert model["adapters"] == ["tiny:botany"]


async def test_the_fleet_has_tenants_weights(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[tenants.acme]\nweight = 3\n")
    gateway = faked(None, limits)
    gateway.administration.detailed = [GROUP]
    fleet = (await gateway.get("/console/fleet")).json()
    assert fleet["weights"] == {"acme": 3, "zeta": 1}
    assert (fleet["alerts"], fleet["attack"]) == ([], None)
    assert fleet["models"][0]["groups"] == [GROUP]


async def test_findings_of_the_last_self_attack_are_shown(tmp_path: Path) -> None:
    report = tmp_path / "attack.json"
    found = {"label": "user_aware", "metric": "pairs", "verdict": "leaks", "note": "<b>", "host": "secret"}
    report.write_text(json.dumps([found]))
    fleet = (await gateway_of(console={"attack_report": report}).get("/console/fleet")).json()
    assert fleet["attack"]["findings"] == [{name: found[name] for name in ("label", "metric", "verdict", "note")}]
    assert [alert["about"] for alert in fleet["alerts"]] == ["attack"]


@pytest.mark.parametrize("text", [None, "{", "7", "[7]", '{"a": 1}'])
async def test_an_unreadable_report_is_an_alert(text: str | None, tmp_path: Path) -> None:
    report = tmp_path / "attack.json"
    if text is not None:
        report.write_text(text)
    fleet = (await gateway_of(console={"attack_report": report}).get("/console/fleet")).json()
    assert fleet["attack"]["error"]
    assert fleet["alerts"][0]["text"].startswith("the report cannot be read")


async def test_changes_of_caches_are_streamed() -> None:
    begins = CacheChanges("g", reset=True, past=[(9, 6, "promoted", {"id": 1})], events=[(7, "inserted", {"id": 1})])
    changes = [begins, CacheChanges("g", error="away")]
    answer = await gateway_of(changes=changes).get("/console/grove")
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, second = map(json.loads, events(answer.text))
    assert (first["group"], first["reset"], first["events"]) == ("g", True, [[7, "inserted", {"id": 1}]])
    assert first["past"] == [[9, 6, "promoted", {"id": 1}]]
    assert second["error"] == "away"


async def test_an_unknown_model_has_no_grove() -> None:
    error_of(await gateway_of().get("/console/grove?model=other"), 404)


async def test_only_so_many_consoles_watch_at_a_time() -> None:
    gateway = gateway_of(changes=[CacheChanges("g")] * 2)
    console = Console(gateway.context, SelfAttack(None), {})
    backend = await console.watchable(None)
    streams = [console.changes(backend) for _ in range(MAX_WATCHERS)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(Exception, match="watching"):
        await console.watchable(None)
    async for _ in streams[0]:
        pass
    assert await console.watchable(None) is backend


@pytest.mark.parametrize(
    ("change", "severity", "text"),
    [
        ({"worker_group": "FAILED"}, "critical", "its workers are FAILED"),
        ({"worker_group": "SLEEPING", "sleep_level": 2}, "warning", "put to sleep at level 2"),
        ({"paused": True}, "warning", "admission is paused"),
        ({"leaked_pages": "2"}, "warning", "2 leaked pages"),
        ({"waiting_requests": 33}, "warning", "33 requests wait for 8 rows"),
        ({"tiers": [{"tier": "host", "capacity_pages": "100", "protected_pages": "95"}]}, "warning", "95 of 100 pages"),
        ({"error": "connection refused"}, "critical", "does not answer: connection refused"),
    ],
)
def test_conditions_that_alert(change: dict[str, Any], severity: str, text: str) -> None:
    model = {"name": "tiny", "missing": [], "groups": [{**GROUP, **change}], "error": None}
    assert alerts([{**model, "groups": [GROUP]}], None) == []
    [alert] = alerts([model], None)
    assert alert.severity == severity
    assert text in alert.text


def test_a_missing_service_alerts_first() -> None:
    model = {"name": "tiny", "missing": ["the tokenizer"], "groups": [{**GROUP, "paused": True}], "error": None}
    assert [alert.severity for alert in alerts([model], None)] == ["critical", "warning"]
