"""What a live deployment reaches only by chance: pins, quarantines, demotions, waits, ranks in trouble, prices."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import ConsoleSettings, GatewaySettings
from common.settings.gateway import PriceSettings
from gateway.pipeline.port import CacheChanges, ScheduledMilestone, ScheduledRequest
from tests.e2e.console.browser import browsing
from tests.e2e.console.faked import serving
from tests.fakes.pipeline import FakeAdministration, FakePipeline, says
from tests.gateway.support import FakedGateway

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from common.types import RequestId, Subject
    from tests.e2e.console.browser import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.extended]

ACME = {"tenant": "acme", "fingerprint": "ab"}
PINNED = {
    "id": 1, "visibility": "public", "owner": {}, "pages": 4, "state": "live", "edge": 64, "depth": 64, "pinned": True,
}  # fmt: skip
OWN = {
    "id": 2, "visibility": "private", "owner": {**ACME, "subject": "ann"}, "pages": 8, "state": "live", "edge": 128,
    "depth": 128, "required": 3,
}  # fmt: skip
SHARED = {
    **OWN, "visibility": "tenant", "owner": ACME, "promoted_by": 4, "promoted_epoch": 7, "creators": 5, "hits": 10,
    "previous_hits": 2,
}  # fmt: skip
HIDDEN = {**SHARED, "quarantined": 2}
GONE = {**SHARED, "id": 9, "edge": 32, "depth": 32, "promoted_by": 6, "pages": 0, "hits": 0, "previous_hits": 0}
HOUR_MS = 3_600_000
PAST: list[tuple[int, int, str, dict[str, Any]]] = [
    (72 * HOUR_MS, -4, "promoted", GONE),
    (48 * HOUR_MS, -3, "quarantined", {**GONE, "quarantined": 1}),
    (2 * HOUR_MS, -2, "demoted", {**GONE, "edge": 0, "quarantined": 1}),
    (HOUR_MS, -1, "promoted", {**PINNED, "pages": 0}),
]
DEMOTED = {**OWN, "generation": 1, "required": 6}
TIER = {
    "tier": "device", "capacity_pages": "100", "free_pages": "50", "soft_free_pages": "0", "evictable_pages": "40",
    "protected_pages": "10",
}  # fmt: skip


def running(tenant: str) -> dict[str, Any]:
    return {"phase": "DECODE", "fingerprint": "ab", "view": {"subject": {"tenant": tenant, "name": "x"}}}


GROUP: dict[str, Any] = {
    "group": "unix:/run/pando/scheduler.sock", "worker_group": "READY", "policy": "fair", "cache": "user_aware",
    "paused": False, "page_size_tokens": 16, "leaked_pages": "0", "waiting_requests": 0, "running_rows": 4,
    "max_rows": 8, "finished_steps": "5", "retractions": "0", "sessions": [], "tiers": [TIER],
    "requests": [running("acme"), running("acme"), running("acme"), running("globex")], "owners": [],
    "ranks": [
        {"rank": 0, "silent_heartbeats": 0, "engine_age_ms": "3", "open_plans": 2},
        {"rank": 1, "silent_heartbeats": 3, "engine_age_ms": "3"},
        {"rank": 2, "silent_heartbeats": 0, "engine_age_ms": "7000", "open_plans": 1},
    ],
}  # fmt: skip
MODEL = "tiny"
FOUND = {"tokens": 96, "public_tokens": 16, "tenant_tokens": 48, "host_tokens": 32, "storage_tokens": 16}


class StatefulAdministration(FakeAdministration):
    async def detailed_states(self, max_owners: int) -> list[dict[str, object]]:
        return [GROUP]

    async def watch_caches(self) -> AsyncGenerator[CacheChanges]:
        yield CacheChanges("g", reset=True, past=PAST, events=[(1, "inserted", PINNED), (2, "snapshot_end", None)])
        for sequence, (kind, node) in enumerate(
            (("inserted", OWN), ("promoted", SHARED), ("quarantined", HIDDEN), ("demoted", DEMOTED)), 3
        ):
            yield CacheChanges("g", events=[(sequence, kind, node)])
        await asyncio.sleep(3600)

    async def timelines(self, request_ids: Sequence[RequestId], subject: Subject) -> list[ScheduledRequest]:
        now = time.time()
        events = [
            ScheduledMilestone("arrived", now - 8, 0),
            ScheduledMilestone("started", now - 6, 0, wait="memory", found=FOUND),
            ScheduledMilestone("retracted", now - 5, 0),
            ScheduledMilestone("started", now - 4, 0, wait="adapter"),
            ScheduledMilestone("prefilled", now - 3, 0),
            ScheduledMilestone("ended", now - 1, 0, finish_reason="STOP", output_tokens=20, charged_tokens=61),
        ]
        return [ScheduledRequest(request_ids[0], tuple(events))]


def make() -> FakedGateway:
    prices = {MODEL: PriceSettings(input=1000, cached_input=100, output=5000, currency="€")}
    settings = GatewaySettings(console=ConsoleSettings(prices=prices))
    return FakedGateway(FakePipeline(says("All", " right")), settings, administration=StatefulAdministration())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with serving(make) as address, browsing(address, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def shown_at(browser: Browser, position: int) -> None:
    """Move the slider of time."""
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(script, browser.find("input[type=range]"), position)


def test_the_grove_says_who_may_see_what_and_why_at_each_time(browser: Browser) -> None:
    browser.open("grove", (1280, 1240))
    browser.until(lambda: len(browser.driver.find_elements("css selector", ".decisions li")) == 7, "seven decisions")
    decisions = [each.text for each in browser.driver.find_elements("css selector", ".decisions li")]
    assert [number for number, text in enumerate(decisions) if "is no longer shared" in text] == [0, 4]
    assert "was hidden from some users" in decisions[1]
    assert "became shared: 4 of 3 users, epoch 7" in decisions[2]
    assert "Prefix 1 became shared: pinned" in decisions[3]
    assert "Prefix 9 became shared: 6 of 3 users, epoch 7" in decisions[6]
    rows = "tbody tr"
    assert [row.text.split("\n")[0] for row in browser.driver.find_elements("css selector", rows)] == [
        "1 everyone pinned 64 0"
    ], "only the pin is shared now"
    browser.find("tbody button.link").click()
    browser.shows("Everyone can reuse it: the operator pinned it.")
    length = int(str(browser.find("input[type=range]").get_attribute("max")))
    shown_at(browser, length - 1)
    browser.shows("4 of 3 users, epoch 7; hidden from 2")
    browser.driver.find_elements("css selector", "tbody button.link")[0].click()
    browser.shows("4 users had computed it themselves by epoch 7, counted by keyed fingerprints; 3 were required")
    browser.shows("Every user of the tenant acme can reuse it")
    browser.shows("5 users have computed it until now")
    browser.shows("Others reused it 12 times in this epoch and the one before, which saved 1,536 tokens")
    browser.shows("It is hidden from 2 users whose requests looked like probes")
    shown_at(browser, length - 2)
    browser.until(lambda: "hidden from 2" not in browser.find("table").text, "the time before the quarantine")
    browser.shows("Before the page was opened: only decisions of that time are known")
    # Before the pin, only its owner could reuse the text; the demoted prefix is back, and hidden from one user.
    shown_at(browser, length - 5)
    browser.shows("This is from before the page was opened")
    browser.until(lambda: "Nothing is shared yet" in browser.text, "the time before the pin")
    shown_at(browser, 2)
    browser.until(lambda: "6 of 3 users, epoch 7; hidden from 1" in browser.find("table").text, "before the demotion")
    shown_at(browser, 1)
    browser.until(lambda: "hidden from 1" not in browser.find("table").text, "the time before the quarantine")
    assert len(browser.driver.find_elements("css selector", rows)) == 1
    shown_at(browser, 0)
    browser.shows("Nothing is shared yet")
    browser.click("Live")
    browser.shows("It was demoted 1 time before")
    browser.shows("text is private until 6 users have computed it themselves")
    assert browser.accessibility() == []
    assert browser.problems() == []


def test_a_request_says_why_it_waited_and_what_it_was_charged(browser: Browser) -> None:
    browser.open("chat")
    browser.ask("Hello")
    # 3 tokens at 1,000 and 4 cached ones at 100, 2 of output at 5,000, for a million.
    assert browser.find(".message.assistant footer .cost").text == "€0.0134"
    browser.find(".message.assistant footer a").click()
    browser.find(".waterfall .span.decode")
    texts = [each.text.replace("\n", " ") for each in browser.driver.find_elements("css selector", ".waterfall li")]
    [first, again] = [text for text in texts if text.startswith("Queue")]
    assert "waited for free pages" in first
    assert "again, as its row was taken for others" in again
    assert "waited for a slot for its adapter" in again
    assert any("96 tokens cached" in text for text in texts)
    for rule in (
        "16 tokens\nshared with everyone",
        "48 tokens\nshared within the tenant",
        "32 tokens\ncomputed for this user before",
        "16 tokens\nof these were loaded from host memory",
        "16 tokens\nof these were loaded from storage",
    ):
        assert rule in browser.text
    charged = browser.find("dl.stats").text
    assert "61" in charged
    assert browser.problems() == []


def test_the_fleet_shows_each_rank_and_shares_against_entitlements(browser: Browser) -> None:
    browser.open("fleet")
    browser.find("table.ranks")
    ranks = [each.text for each in browser.driver.find_elements("css selector", "table.ranks tbody tr")]
    assert ranks == ["0 answers 2", "1 no answer to 3 heartbeats –", "2 no progress for 7.00 s 1"]
    fairness = [
        each.text for each in browser.driver.find_elements("css selector", "[aria-labelledby=fairness] tbody tr")
    ]
    assert [line.split()[:6] for line in fairness] == [
        ["acme", "50", "%", "3", "75", "%"],
        ["globex", "50", "%", "1", "25", "%"],
    ]
    assert browser.accessibility() == []
    assert browser.problems() == []
