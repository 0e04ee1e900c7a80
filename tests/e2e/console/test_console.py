"""The console in a real browser, with the real services: what a person does there, and pictures of it.

Pictures are written to the directory that CONSOLE_PICTURES names, otherwise to one of the test's own:
`CONSOLE_PICTURES=docs/images` renews those of the documentation.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from common.settings import CacheSettings, ConsoleSettings, GatewaySettings, SchedulerSettings, Settings
from tests.e2e.conftest import require_model, serve
from tests.e2e.console.browser import PHONE, WIDE, browsing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.console.browser import Browser
    from tests.e2e.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.extended]

PICTURES = "CONSOLE_PICTURES"
# Pages, and what each shows when it is ready.
READY = {"chat": "#draft", "grove": "canvas.grove", "explain": "main input", "fleet": ".uplot canvas"}
# Of each page, size and theme, those that docs/console.md shows.
SHOWN = (("grove", PHONE, "dark"), ("fleet", WIDE, "dark"))
SYSTEM = (
    "You are the assistant of a botanical garden. Visitors ask you about trees, their age, their roots and the "
    "animals that live on them. Answer in two short sentences, in plain words that a child understands, and never "
    "guess: if you do not know something, say which of the gardeners to ask, and at which of the three gates."
)
# Who asks, and what.
VISITORS = {"ann": "How old are oaks?", "ben": "What is a pando?", "cleo": "Do birch roots sleep?"}


@pytest.fixture(scope="module")
def deployed(run_root: Path) -> Iterator[Served]:
    """A deployment with the real model, short epochs and the report of a self-attack."""
    require_model()
    report = run_root / "attack.json"
    known = {"label": "user_aware", "metric": "pairs", "verdict": "closed", "value": 0.502, "note": "first token"}
    findings = [
        known,
        {**known, "metric": "sybils", "verdict": "bounded", "note": "shared at k = 3, as stated"},
        {**known, "label": "shared", "verdict": "leaks", "value": 1.0, "control": True, "note": "the control"},
    ]
    report.write_text(json.dumps(findings))
    settings = Settings(
        gateway=GatewaySettings(port=0, anonymous="vouched", console=ConsoleSettings(attack_report=report)),
        scheduler=SchedulerSettings(
            cache=CacheSettings(epoch_seconds=1.0), admin_token=SecretStr("a token of the tests")
        ),
    )
    yield from serve(settings, run_root)


@pytest.fixture(scope="module")
def browser(deployed: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(deployed.url, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = os.environ.get(PICTURES)
    return Path(chosen) if chosen else tmp_path_factory.mktemp("pictures")


def ask(served: Served, user: str, question: str) -> int:
    """Ask as one of the garden's visitors; return the number of cached prompt tokens."""
    answer = served.client().chat.completions.create(
        model=served.model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        user=user,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_person_chats_edits_stops_and_repeats(browser: Browser, pictures: Path) -> None:
    browser.open("chat")
    browser.ask("Name three primary colors.")
    browser.find(".message.assistant footer .rate")
    assert browser.find(".message.assistant .markdown").text
    browser.click("Retry")
    # The whole prompt is the person's own, so it is cached for the second time.
    browser.shows("cached")
    browser.picture(pictures / "chat.png")
    browser.click("Edit")
    assert browser.run("return document.getElementById('draft').value") == "Name three primary colors."
    assert not browser.driver.find_elements("css selector", ".message")
    browser.find("#draft").clear()
    browser.click(f"{browser.find('summary span').text}Settings")
    tokens = browser.find("input[inputmode=numeric]")
    tokens.clear()
    tokens.send_keys("4000")
    browser.ask("Write a very long story about an old aspen, with many chapters.")
    browser.until(lambda: len(browser.find(".message.assistant .markdown").text) > 20, "the first words")
    browser.click("Stop")
    browser.shows("stopped")
    assert browser.problems() == []


def test_an_answer_follows_a_schema_typed_into_the_form(browser: Browser) -> None:
    browser.open("chat")
    browser.click(f"{browser.find('summary span').text}Settings")
    schema = {"type": "object", "properties": {"tall": {"type": "boolean"}}, "required": ["tall"]}
    form = browser.find("textarea.code")
    form.send_keys("{")
    browser.ask("Is an oak tall?")
    browser.shows("JSON schema:")
    form.clear()
    form.send_keys(json.dumps(schema))
    browser.click("Try again")
    browser.find(".message.assistant footer .rate")
    answer = json.loads(re.sub(r"\s+", " ", browser.find(".message.assistant .markdown").text))
    assert answer.keys() == {"tall"}


def test_a_prompt_becomes_shared_as_three_users_ask(browser: Browser, deployed: Served, pictures: Path) -> None:
    browser.open("grove", (1280, 1240))
    for user, question in VISITORS.items():
        assert ask(deployed, user, question) < 16, "nobody finds what only others have asked"
    browser.find(".tag.tenant")
    assert ask(deployed, "dora", "Why do leaves fall?") > 60
    browser.find(".decisions li")
    browser.find("tbody button.link").click()
    browser.shows("had computed it themselves by epoch")
    # Counted when the gateway asks for hits the next time.
    browser.shows("which saved")
    browser.shows("Every user of the tenant default")
    browser.run("scrollTo(0, 0)")
    browser.picture(pictures / "grove.png")
    slider = browser.find("input[type=range]")
    now = int(str(slider.get_attribute("max")))
    assert now > 0
    script = "arguments[0].value = 0; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(script, slider)
    browser.shows("Nothing is shared yet")
    browser.click("Live")
    browser.find(".tag.tenant")
    assert browser.problems() == []


def test_a_request_is_explained_to_its_owner(browser: Browser, pictures: Path) -> None:
    browser.open("chat")
    browser.ask("Name three primary colors.")
    browser.find(".message.assistant footer .rate")
    browser.find(".message.assistant footer a").click()
    browser.find(".waterfall .span.decode")
    browser.shows("Whole request")
    phases = [each.text.split("\n")[0] for each in browser.driver.find_elements("css selector", ".waterfall li")]
    assert [phase.split()[0] for phase in phases] == ["Tokenize", "Queue", "Prefill", "Decode", "Deliver"]
    browser.shows("computed for this user before")
    browser.picture(pictures / "explain.png")
    browser.find("main input").clear()
    browser.find("main input").send_keys("chatcmpl-unknown")
    browser.click("Explain")
    browser.shows("There is no such request")
    # The browser reports the answer 404 itself.
    assert [line for line in browser.problems() if "404" not in line] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("page", READY)
def test_pages_are_accessible_and_fit(
    browser: Browser, pictures: Path, page: str, size: tuple[int, int], theme: str
) -> None:
    browser.open(page, size, theme)
    browser.find(READY[page])
    assert browser.run("return getComputedStyle(document.documentElement).colorScheme")
    assert browser.accessibility() == []
    width = browser.run("return document.documentElement.scrollWidth")
    assert width <= size[0], "nothing is wider than the screen"
    if (page, size, theme) in SHOWN:
        if page == "grove":
            browser.find(".tag")
        browser.picture(pictures / f"{page}-{theme}.png")
    assert browser.problems() == []


def test_everything_can_be_reached_by_keyboard(browser: Browser, deployed: Served) -> None:
    for user, question in VISITORS.items():
        ask(deployed, user, question)
    browser.open("grove")
    browser.find("tbody button.link")
    names = []
    for _ in range(30):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        names.append(browser.run("return document.activeElement.textContent.trim() || document.activeElement.tagName"))
        if names[-1] == "CANVAS":
            break
    assert names[0] == "Skip to content"
    assert {"Chat", "Grove", "Explain", "Fleet", "CANVAS"} <= set(names)
    ActionChains(browser.driver).send_keys(Keys.ARROW_RIGHT).perform()
    browser.shows("Show only this branch")


def test_the_fleet_shows_a_killed_service_and_its_return(browser: Browser, deployed: Served, pictures: Path) -> None:
    browser.open("fleet")
    browser.shows("No alerts")
    browser.shows("the control")
    browser.picture(pictures / "fleet.png")

    def alerts_of_a_kill() -> bool:
        # It may be back before the page asks the next time.
        if deployed.is_ready():
            deployed.deployment.kill("scheduler")
        return bool(browser.driver.find_elements("css selector", ".alert.critical"))

    browser.until(alerts_of_a_kill, "a critical alert")
    browser.picture(pictures / "fleet-alert.png")
    browser.shows("No alerts")
    assert browser.problems() == []
