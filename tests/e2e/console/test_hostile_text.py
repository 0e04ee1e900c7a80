"""Markup in every text that users, models and files control: it is shown, and does nothing.

The gateway is real and its pipeline a fake, so that the model says what an attacker wants.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from common.adapters import AdapterInfo
from common.requests import ChatPrompt, ImageLimits
from common.settings import ConsoleSettings, GatewaySettings
from common.types import ErrorCode, RequestFailure
from gateway.pipeline.port import CacheChanges, LoadedAdapter
from tests.e2e.console.browser import browsing
from tests.e2e.console.faked import serving
from tests.fakes.pipeline import CARD, FakeAdministration, FakeModel, FakePipeline, FakeReadiness, rejects, says
from tests.gateway.support import FakedGateway

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from common.requests import GenerateRequest
    from tests.e2e.console.browser import Browser
    from tests.fakes.pipeline import Event

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.extended]

# Each would set `window.pwned`, or ask another server, if it were not neutralised.
HOSTILE = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<img src=//evil.example/p.png>",
    "<svg onload='window.pwned = 1'><a xlink:href='javascript:window.pwned = 1'>x</a></svg>",
    "<svg><style><img src=x onerror='window.pwned = 1'></style></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=window.pwned=1&gt;'>",
    "<noscript><p title='</noscript><img src=x onerror=window.pwned=1>'>",
    "<form id=content action=javascript:window.pwned=1><input name=body autofocus onfocus='window.pwned = 1'></form>",
    "<iframe srcdoc='<script>parent.pwned = 1</script>'></iframe>",
    "<object data='data:text/html,<script>parent.pwned=1</script>'></object>",
    "<base href='https://evil.example/'><link rel=stylesheet href='//evil.example/a.css'>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<details open ontoggle='window.pwned = 1'>x</details>",
    "<a href='javascript:window.pwned=1'>press</a>",
    "<div style='position:fixed;inset:0;background:url(//evil.example/s)'>over all</div>",
    "<template><script>window.pwned = 1</script></template>",
    "[press](javascript:window.pwned=1)",
    "[press](jAvAsCrIpT&#58;window.pwned=1)",
    "[press](data:text/html;base64,PHNjcmlwdD5wYXJlbnQucHduZWQ9MTwvc2NyaXB0Pg==)",
    "[press](vbscript:pwned)",
    "![p](https://evil.example/p.png 'x')",
    "![p](x'onerror='window.pwned=1)",
    "```<script>window.pwned = 1</script>\n<img src=x onerror=window.pwned=1>\n```",
    "| <img src=x onerror=window.pwned=1> |\n| --- |\n| <script>window.pwned=1</script> |",
    "</p></div></main><script>window.pwned = 1</script>",
    "${window.pwned = 1} {{constructor.constructor('window.pwned=1')()}}",
    "\u202e<script>window.pwned = 1</script>",
)
MODEL = HOSTILE[1]
ALL = " ".join(" ".join(HOSTILE).split())
# What a message begins with that the model refuses with the rest as its reason.
REFUSE = "Refuse "
OWNER = {"tenant": HOSTILE[1], "subject": HOSTILE[0], "salt": HOSTILE[3], "fingerprint": HOSTILE[1]}
SHARED = {
    "id": 1, "visibility": "tenant", "owner": OWNER, "pages": 4, "state": "live", "edge": 64, "depth": 64,
    "promoted_by": 3, "promoted_epoch": 7,
}  # fmt: skip
OWN = {**SHARED, "id": 2, "parent": 1, "visibility": "private", "depth": 128}
# Lines and spaces are shown as a browser does.
MISSING = [text for text in HOSTILE if "\n" not in text]
# Drops a file on the composer that is no picture.
DROP = """
const transfer = new DataTransfer();
transfer.items.add(new File(["x"], arguments[0], {type: "text/plain"}));
const init = {bubbles: true, cancelable: true, dataTransfer: transfer};
document.querySelector("#draft").dispatchEvent(new DragEvent("drop", init));
"""
GROUP: dict[str, Any] = {
    "group": HOSTILE[1], "worker_group": HOSTILE[1], "policy": HOSTILE[0], "cache": HOSTILE[1], "paused": True,
    "page_size_tokens": 16, "leaked_pages": "0", "waiting_requests": 0, "running_rows": 1, "max_rows": 8,
    "finished_steps": "5", "retractions": "0", "sessions": [],
    "tiers": [{"tier": HOSTILE[1], "capacity_pages": "100", "free_pages": "50", "soft_free_pages": "0",
               "evictable_pages": "40", "protected_pages": "10"}],
    "requests": [{"phase": "DECODE", "fingerprint": "ab", "view": {"subject": {"tenant": HOSTILE[1], "name": "x"}}}],
    "owners": [{"tenant": HOSTILE[0], "fingerprint": "ab", "device_pages": "1", "host_pages": "0", "visibility": ""}],
}  # fmt: skip


def repeat(request: GenerateRequest) -> Iterable[Event]:
    """Answer with the last message; ask for a question's answer from the tool, if there is one."""
    assert isinstance(request.prompt, ChatPrompt)
    last = request.prompt.messages[-1]
    if (last.content or "").startswith(REFUSE):
        return rejects(RequestFailure(ErrorCode.INVALID_REQUEST, last.content or ""))(request)
    if request.prompt.tools_json and last.role == "user":
        name = json.loads(request.prompt.tools_json[0])["function"]["name"]
        call = json.dumps({"name": name, "arguments": {"question": last.content}})
        return says(f"<tool_call>{call}</tool_call>")(request)
    return says(last.content or "")(request)


class HostileAdministration(FakeAdministration):
    async def adapters(self) -> list[LoadedAdapter]:
        return [LoadedAdapter(AdapterInfo(name, name)) for name in HOSTILE]

    async def detailed_states(self, max_owners: int) -> list[dict[str, object]]:
        return [GROUP, {"group": HOSTILE[0], "error": ALL}]

    async def watch_caches(self) -> AsyncGenerator[CacheChanges]:
        group = HOSTILE[1]
        yield CacheChanges(group, reset=True, events=[(1, "snapshot_end", None)])
        yield CacheChanges(group, events=[(2, "promoted", SHARED), (3, "inserted", OWN)])
        yield CacheChanges(HOSTILE[0], error=ALL)
        await asyncio.sleep(3600)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway whose model, pipeline, caches, errors and report are hostile."""
    report = tmp_path_factory.mktemp("report") / "attack.json"
    fields = ("label", "metric", "verdict", "note", "value")
    report.write_text(json.dumps([dict.fromkeys(fields, each) for each in HOSTILE]))
    settings = GatewaySettings(console=ConsoleSettings(attack_report=report))
    model = FakeModel(replace(CARD, name=MODEL, images=ImageLimits(4, 1000, 10**7)))

    def make() -> FakedGateway:
        readiness = FakeReadiness(list(HOSTILE))
        administration = HostileAdministration()
        return FakedGateway(FakePipeline(repeat), settings, model, readiness, administration)

    with serving(make) as address:
        yield address


@pytest.fixture(scope="module")
def browser(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(address, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def enter(browser: Browser, selector: str, text: str) -> None:
    """Put a text, which may have characters that WebDriver cannot type, into a field."""
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(script, browser.find(selector), text)


def check_harmless(browser: Browser, *expected: str) -> None:
    """Check that nothing ran, was loaded or could be pressed, and that the page still is the console's."""
    assert browser.run("return window.pwned") is None
    names = browser.run("return performance.getEntriesByType('resource').map((each) => new URL(each.name).host)")
    assert set(names) == {browser.run("return location.host")}
    elements = "script, iframe, object, embed, base, meta[http-equiv], form, img, svg a, style, link[href*=evil]"
    outside = "[...document.querySelectorAll('main ' + arguments[0].split(', ').join(', main '))]"
    allowed = "(each) => !['composer', 'card', 'row', 'row sign-in'].includes(each.className)"
    assert browser.run(f"return {outside}.filter({allowed}).map((each) => each.outerHTML)", elements) == []
    links = browser.run("return [...document.querySelectorAll('main a[href]')].map((each) => each.protocol)")
    assert set(links) <= {"http:", "https:", "mailto:"}
    handlers = "[...document.querySelectorAll('main *')].flatMap((each) => each.getAttributeNames())"
    assert [name for name in browser.run(f"return {handlers}") if name.startswith("on")] == []
    # DOMPurify parses text in a document of its own, whose handlers and styles the browser reports as refused.
    known = ("/vendor/dompurify.js", *expected)
    assert [line for line in browser.problems() if not any(text in line for text in known)] == []


def test_answers_and_questions_are_harmless(browser: Browser) -> None:
    browser.open("chat")
    for number, text in enumerate(HOSTILE, 1):
        # The model repeats it.
        enter(browser, "#draft", text)
        browser.click("Send", ".composer")
        browser.until(lambda: len(browser.driver.find_elements("css selector", ".message footer")) == number, text)  # noqa: B023
    check_harmless(browser)
    questions = browser.driver.find_elements("css selector", ".message.user .plain")
    assert questions[0].text == HOSTILE[0]
    # Markdown is rendered, and code shows markup as it is.
    shown = browser.run("return [...document.querySelectorAll('.markdown pre')].map((each) => each.textContent)")
    assert any("<img src=x onerror=window.pwned=1>" in text for text in shown)
    assert browser.driver.find_elements("css selector", ".markdown table")


def test_a_tool_of_the_form_is_called_and_gets_a_harmless_result(browser: Browser) -> None:
    browser.open("chat", (1280, 1500))
    browser.click(f"{MODEL}Settings")
    names = browser.run("return [...document.querySelectorAll('main option')].map((each) => each.textContent)")
    assert names == [MODEL, *(f"{MODEL}:{name}" for name in HOSTILE)]
    browser.click("Add a tool")
    name, description = browser.driver.find_elements("css selector", ".tools input")
    enter(browser, "#draft", HOSTILE[0])
    browser.click("Send", ".composer")
    browser.shows("Tool 1 has no name")
    name.send_keys("find")
    description.send_keys(HOSTILE[1])
    schema = browser.find(".tools textarea")
    schema.send_keys("{")
    browser.click("Try again")
    browser.shows("Parameters of find:")
    schema.clear()
    schema.send_keys('{"type": "object", "properties": {"question": {"type": "string"}}}')
    browser.click("Try again")
    browser.find("section form.card")
    assert browser.find(".call code").text == "find"
    assert json.loads(browser.find(".call pre").text) == {"question": HOSTILE[0]}
    assert browser.accessibility() == []
    enter(browser, "section form.card textarea", HOSTILE[4])
    browser.click("Send the results")
    browser.until(lambda: len(browser.driver.find_elements("css selector", ".message footer")) == 2, "the answer")
    assert browser.find(".message.tool .plain").text == HOSTILE[4]
    check_harmless(browser)
    browser.click("Remove tool 1")
    assert not browser.driver.find_elements("css selector", ".tools fieldset")


def test_names_in_the_grove_are_harmless(browser: Browser) -> None:
    browser.open("grove")
    browser.find("tbody button.link").click()
    browser.shows("every user of the tenant")
    browser.find(".decisions li")
    assert HOSTILE[1] in browser.text
    browser.until(lambda: ALL in browser.text, "the error of a group")
    check_harmless(browser)


def test_names_and_findings_in_the_fleet_are_harmless(browser: Browser) -> None:
    browser.open("fleet")
    browser.shows("Last self-attack")
    assert len(browser.driver.find_elements("css selector", "[aria-labelledby=attack] tbody tr")) == len(HOSTILE)
    assert HOSTILE[0] in browser.text
    alerts = " ".join(each.text for each in browser.driver.find_elements("css selector", ".alert"))
    assert [text for text in (*MISSING, ALL) if text not in alerts] == []
    assert browser.find("section[aria-label^='Model'] h2").text == MODEL
    check_harmless(browser)


def test_the_name_of_a_model_is_harmless_where_its_requests_are_explained(browser: Browser) -> None:
    browser.open("chat")
    browser.ask("Hello")
    browser.find(".message.assistant footer a").click()
    browser.until(lambda: browser.find("#waterfall").text == MODEL, "the model's name")
    check_harmless(browser)


def test_errors_and_names_of_files_are_harmless(browser: Browser) -> None:
    browser.open("chat")
    enter(browser, "#draft", f"{REFUSE}{ALL}")
    browser.click("Send", ".composer")
    browser.until(lambda: ALL in browser.find(".notice.error").text, "the reason of the refusal")
    for name in HOSTILE:
        browser.run(DROP, name)
        line = name.splitlines()[0]
        browser.until(lambda: browser.find(".notice.error").text.count(line) == 1, name)  # noqa: B023
    assert "is not a JPEG" in browser.find(".notice.error").text
    # The browser reports the refusal, with status 400, itself.
    check_harmless(browser, "status of 400")


def test_an_id_in_the_address_is_harmless(browser: Browser) -> None:
    browser.open(f"explain/{HOSTILE[1].replace('%', '%25')}")
    browser.shows("Not found")
    assert browser.run("return document.querySelector('main input').value") == HOSTILE[1]
    # The browser reports the answer 404 itself.
    assert browser.run("return window.pwned") is None
    assert [line for line in browser.problems() if "404" not in line] == []


def test_the_policy_stops_what_a_mistake_would_let_through(browser: Browser) -> None:
    """The second line of defence: without DOMPurify's output, no text becomes HTML, and no inline script runs."""
    browser.open("fleet")
    refused = "try { document.body.innerHTML = '<b>x</b>'; return false } catch (error) { return error.name }"
    assert browser.run(refused) == "TypeError"
    inline = (
        "const script = document.createElement('script'); script.setAttribute('src', 'data:text/javascript,pwned=1');"
    )
    browser.run(f"try {{ {inline} document.body.append(script) }} catch {{}}")
    assert browser.run("return window.pwned") is None
    assert browser.problems() != []
