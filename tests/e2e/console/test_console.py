"""The console in a real browser, with the real services: what a person does there, and pictures of it.

Pictures are written to the directory that CONSOLE_PICTURES names, otherwise to one of the test's own:
`CONSOLE_PICTURES=docs/images` renews those of the documentation.
"""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

    from openai.types.chat import ChatCompletion

    from tests.e2e.console.browser import Browser
    from tests.e2e.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.extended]

PICTURES = "CONSOLE_PICTURES"
# Pages, and what each shows when it is ready.
READY = {"chat": "#draft", "grove": "canvas.grove", "explain": "main input", "fleet": ".uplot canvas"}
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
            # Short epochs, but what a busy machine does in minutes still counts together.
            cache=CacheSettings(epoch_seconds=1.0, promotion_epochs=1000),
            admin_token=SecretStr("a token of the tests"),
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


def ask(served: Served, user: str, question: str, system: str) -> ChatCompletion:
    """Ask as one of the garden's visitors."""
    return served.client().chat.completions.create(
        model=served.model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        user=user,
    )


def cached_tokens(answer: ChatCompletion) -> int:
    """Return the number of the prompt's tokens that were cached."""
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


@contextmanager
def visited(served: Served, visitors: int = 3) -> Iterator[None]:
    """Let visitors ask one question after the other within the block."""
    leaving = threading.Event()

    def visit(user: str) -> None:
        while not leaving.is_set():
            served.complete(f"{user} walks through the garden and says", max_tokens=32, user=user)

    with ThreadPoolExecutor(visitors) as pool:
        visits = [pool.submit(visit, f"visitor {number}") for number in range(visitors)]
        try:
            yield
        finally:
            leaving.set()
    for visit_ in visits:
        visit_.result()


def test_a_walk_through_the_console(browser: Browser, deployed: Served, pictures: Path) -> None:
    """One visit shows all of docs/console.md: chat, watch, explain, and kill a service."""
    browser.open("")
    chat_and_repeat(browser, pictures)
    request_id = watch_a_prompt_become_shared(browser, deployed, pictures)
    explain_to_its_owner(browser, request_id, pictures)
    # The browser reports the answer 404 to an unknown id itself.
    assert [line for line in browser.problems() if "404" not in line] == []
    kill_a_service(browser, deployed, pictures)
    assert browser.problems() == []


def chat_and_repeat(browser: Browser, pictures: Path) -> None:
    browser.find("#draft")
    assert browser.run("return document.documentElement.scrollHeight <= innerHeight"), "an empty chat does not scroll"
    browser.ask("Name three primary colors.")
    browser.find(".message.assistant footer .rate")
    assert browser.find(".message.assistant .markdown").text
    browser.click("Retry")
    # The whole prompt is the person's own, so it is cached for the second time.
    browser.shows("cached")
    browser.picture(pictures / "chat.png")
    browser.find(".message.assistant footer a").click()
    browser.find(".waterfall .span.decode")
    browser.shows("computed for this user before")


def watch_a_prompt_become_shared(browser: Browser, deployed: Served, pictures: Path) -> str:
    """Return the id of the answer that found it."""
    browser.look((1280, 1240))
    browser.turn_to("grove")
    for user, question in VISITORS.items():
        assert cached_tokens(ask(deployed, user, question, SYSTEM)) < 16, "what only others have asked is not found"
    browser.find(".tag.tenant")
    answer = ask(deployed, "dora", "Why do leaves fall?", SYSTEM)
    assert cached_tokens(answer) > 60
    browser.find(".decisions li")
    browser.find("tbody button.link").click()
    browser.shows("had computed it themselves by epoch")

    def reuse_is_shown() -> bool:
        # Counted by epoch, and shown when the gateway asks for hits the next time.
        ask(deployed, "dora", "Why do leaves fall?", SYSTEM)
        return "which saved" in browser.text

    browser.until(reuse_is_shown, "reuse by others")
    browser.shows("Every user of the tenant default")
    browser.run("scrollTo(0, 0)")
    browser.picture(pictures / "grove.png")
    assert browser.accessibility() == []
    browser.look(PHONE, "dark")
    browser.picture(pictures / "grove-dark.png")
    assert browser.accessibility() == []
    browser.look()
    slider = browser.find("input[type=range]")
    assert int(str(slider.get_attribute("max"))) > 0
    script = "arguments[0].value = 0; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(script, slider)
    browser.shows("Nothing is shared yet")
    browser.click("Live")
    browser.find(".tag.tenant")
    return answer.id


def explain_to_its_owner(browser: Browser, request_id: str, pictures: Path) -> None:
    browser.turn_to("explain")
    for text, shown in (("chatcmpl-unknown", "There is no such request"), (request_id, "shared within the tenant")):
        browser.find("main input").clear()
        browser.find("main input").send_keys(text)
        browser.click("Explain")
        browser.shows(shown)
    browser.shows("Whole request")
    phases = [each.text.split("\n")[0] for each in browser.driver.find_elements("css selector", ".waterfall li")]
    assert [phase.split()[0] for phase in phases] == ["Tokenize", "Queue", "Prefill", "Decode", "Deliver"]
    browser.picture(pictures / "explain.png")


def kill_a_service(browser: Browser, deployed: Served, pictures: Path) -> None:
    browser.turn_to("fleet")
    browser.shows("No alerts")
    browser.shows("the control")
    asked = "return performance.getEntriesByType('resource').filter((each) => each.name.endsWith('/fleet')).length"
    with visited(deployed):
        browser.find("[aria-label^='Rows and queue: running']:not([aria-label*='running 0'])")
        # A line of some length.
        enough = int(browser.run(asked)) + 12
        browser.until(lambda: int(browser.run(asked)) >= enough, "more samples")
        browser.find("[aria-label^='Rows and queue: running']:not([aria-label*='running 0'])")
        browser.look(WIDE, "dark")
        browser.picture(pictures / "fleet-dark.png")
        browser.look()

    def alerts_of_a_kill() -> bool:
        # It may be back before the page asks the next time.
        if deployed.is_ready():
            deployed.deployment.kill("scheduler")
        return bool(browser.driver.find_elements("css selector", ".alert.critical"))

    browser.until(alerts_of_a_kill, "a critical alert")
    browser.picture(pictures / "fleet-alert.png")
    shown = " ".join(each.text for each in browser.driver.find_elements("css selector", ".alerts"))
    assert "unix:" not in shown, "sockets have short names"
    browser.shows("No alerts")


def test_a_person_edits_a_message_and_stops_an_answer(browser: Browser) -> None:
    browser.open("chat")
    browser.ask("Name three primary colors.")
    browser.find(".message.assistant footer .rate")
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
    browser.find(".message.assistant footer a")
    answer = json.loads(re.sub(r"\s+", " ", browser.find(".message.assistant .markdown").text))
    assert answer.keys() == {"tall"}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("page", READY)
def test_pages_are_accessible_and_fit(browser: Browser, page: str, size: tuple[int, int], theme: str) -> None:
    browser.open(page, size, theme)
    browser.find(READY[page])
    assert browser.run("return getComputedStyle(document.documentElement).colorScheme")
    assert browser.accessibility() == []
    width = browser.run("return document.documentElement.scrollWidth")
    assert width <= size[0], "nothing is wider than the screen"
    assert browser.problems() == []


def test_everything_can_be_reached_by_keyboard(browser: Browser, deployed: Served) -> None:
    for user, question in VISITORS.items():
        # Another prompt than the walk's, which must be new there.
        ask(deployed, user, question, SYSTEM.replace("botanical garden", "railway museum"))
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
