"""The console with API keys, in a real browser: owners see their own requests, and nothing of others on any page."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from common.settings import GatewaySettings
from gateway.identity.keys import ApiKey, hash_of, save_keys
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

TENANTS = {"ann": "acme", "zoe": "globex", "root": "operators"}
# What an owner of another tenant must not find anywhere; an administrator does.
FOREIGN = ("globex", "zoe")
NODE = {
    "id": 7, "visibility": "tenant", "owner": {"tenant": "globex"}, "pages": 4, "state": "live", "edge": 64,
    "depth": 64, "promoted_by": 3, "promoted_epoch": 7,
}  # fmt: skip
GROUP: dict[str, Any] = {
    "group": "unix:/run/pando/scheduler.sock", "worker_group": "READY", "policy": "fair", "cache": "user_aware",
    "paused": False, "page_size_tokens": 16, "leaked_pages": "0", "waiting_requests": 0, "running_rows": 1,
    "max_rows": 8, "finished_steps": "5", "retractions": "0", "sessions": [], "tiers": [], "owners": [], "ranks": [],
    "requests": [{"phase": "DECODE", "fingerprint": "ab", "view": {"subject": {"tenant": "globex", "name": "zoe"}}}],
}  # fmt: skip


class SharedAdministration(FakeAdministration):
    async def detailed_states(self, max_owners: int) -> list[dict[str, object]]:
        return [GROUP]

    async def watch_caches(self) -> AsyncGenerator[CacheChanges]:
        yield CacheChanges("g", reset=True, events=[(1, "snapshot_end", None)])
        yield CacheChanges("g", events=[(2, "promoted", NODE)])
        await asyncio.sleep(3600)

    async def timelines(self, request_ids: Sequence[RequestId], subject: Subject) -> list[ScheduledRequest]:
        now = time.time()
        events = (
            ScheduledMilestone("arrived", now - 4, 0),
            ScheduledMilestone("started", now - 3, 0, wait="turn"),
            ScheduledMilestone("prefilled", now - 2, 0),
            ScheduledMilestone("ended", now - 1, 0, finish_reason="STOP", output_tokens=2, charged_tokens=9),
        )
        return [ScheduledRequest(request_ids[0], events)]


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    directory = tmp_path_factory.mktemp("keys")
    file = directory / "keys.toml"
    keys = [ApiKey(name, hash_of(name), tenant, name, admin=name == "root") for name, tenant in TENANTS.items()]
    save_keys(file, keys)

    def make() -> FakedGateway:
        settings = GatewaySettings(keys_file=file)
        return FakedGateway(FakePipeline(says("All", " right")), settings, administration=SharedAdministration())

    with serving(make) as address, browsing(address, directory / "profile") as opened:
        yield opened


def sign_in(browser: Browser, name: str) -> None:
    browser.open("chat")
    if browser.run("return sessionStorage.length"):
        browser.click("Forget the key", ".who")
    browser.find(".sign-in input").send_keys(name)
    browser.click("Use this key")
    browser.find("#draft")
    assert f"{TENANTS[name]}/" in browser.find(".identity").text


def ask(browser: Browser) -> str:
    """Chat, and return the id of the answer."""
    browser.ask("Hello")
    return unquote(str(browser.find(".message.assistant footer a").get_attribute("href")).rpartition("/")[2])


def shown(browser: Browser, text: str) -> bool:
    """Whether a text is anywhere in the page, also where it is not visible."""
    return text in str(browser.run("return document.documentElement.outerHTML"))


def test_an_owner_explains_their_own_request_and_sees_nothing_of_others(browser: Browser) -> None:
    sign_in(browser, "zoe")
    foreign = ask(browser)
    sign_in(browser, "ann")
    own = ask(browser)
    assert own != foreign
    browser.find(".message.assistant footer a").click()
    browser.find(".waterfall .span.decode")
    browser.shows(own)
    refusals = []
    for request_id in (foreign, "chatcmpl-unknown"):
        browser.open(f"explain/{request_id}")
        browser.shows("Not found")
        refusals.append(browser.find(".notice").text.replace(request_id, "ID"))
        assert not browser.driver.find_elements("css selector", ".waterfall")
    assert refusals[0] == refusals[1], "another's request looks like none"
    for page in ("chat", "explain", "grove", "fleet"):
        browser.open(page)
        browser.find("#draft" if page == "chat" else "main input")
        assert ("This page needs a credential" in browser.text) == (page in ("grove", "fleet"))
        assert not [text for text in (*FOREIGN, foreign) if shown(browser, text)]
        assert browser.accessibility() == []
    # The same pages name them to an administrator.
    sign_in(browser, "root")
    for page in ("grove", "fleet"):
        browser.open(page)
        browser.shows("globex")
    browser.open(f"explain/{foreign}")
    browser.find(".waterfall .span.decode")
    # The browser reports refused requests itself.
    expected = ("401", "403", "404")
    assert [line for line in browser.problems() if not any(f"status of {code}" in line for code in expected)] == []
