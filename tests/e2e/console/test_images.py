"""Images in the console's chat, in a real browser: attached, removed, pasted, shown and sent."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.requests import ChatPrompt, ImageFile, ImageLimits
from tests.e2e.console.browser import PHONE, WIDE, browsing
from tests.fakes.pipeline import CARD, FakeModel, FakePipeline, says
from tests.gateway.listening import listening
from tests.gateway.support import FakedGateway

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.requests import ChatMessage
    from tests.e2e.console.browser import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.extended]

# One red pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
# Gives the composer a file as the clipboard and a drag would.
TRANSFER = """
const bytes = Uint8Array.from(atob(arguments[1]), (each) => each.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], arguments[2], {type: "image/png"}));
const target = document.querySelector("#draft");
const init = {bubbles: true, cancelable: true};
target.dispatchEvent(arguments[0] === "paste"
  ? new ClipboardEvent("paste", {...init, clipboardData: transfer})
  : new DragEvent("drop", {...init, dataTransfer: transfer}));
"""


@pytest.fixture(scope="module")
def gateway() -> FakedGateway:
    sees = replace(CARD, images=ImageLimits(4, 1000, 10**7))
    return FakedGateway(FakePipeline(says("A red pixel.")), model=FakeModel(sees))


@pytest.fixture(scope="module")
def browser(gateway: FakedGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started: Future[int] = Future()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        async with listening(gateway) as port:
            started.set_result(port)
            await ending.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        port = started.result(60)
        with browsing(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("profile")) as shown:
            yield shown
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()


def last_message(gateway: FakedGateway) -> ChatMessage:
    prompt = gateway.pipeline.submitted[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages[-1]


def test_images_are_attached_removed_shown_and_sent(browser: Browser, gateway: FakedGateway, tmp_path: Path) -> None:
    names = ("one.png", "two.png")
    for name in names:
        (tmp_path / name).write_bytes(PNG)
    browser.open("chat")
    for name in names:
        browser.find("input[type=file]").send_keys(str(tmp_path / name))
        browser.find(f".composer .pictures img[alt='{name}']")
    shown = "return [...document.querySelectorAll('.composer img')].filter((each) => each.naturalWidth === 1).length"
    browser.until(lambda: browser.run(shown) == len(names), "thumbnails")
    for size in (WIDE, PHONE):
        browser.driver.set_window_size(*size)
        assert browser.accessibility() == []
    browser.find("button[aria-label='Remove one.png']").click()
    browser.until(lambda: browser.run("return document.querySelectorAll('.pictures img').length") == 1, "one image")
    browser.ask("What is it?")
    browser.shows("A red pixel.")
    assert last_message(gateway).parts == (ImageFile(PNG), "What is it?")
    browser.find(".message.user img[alt='two.png']")
    for way in ("paste", "drop"):
        browser.run(TRANSFER, way, b64encode(PNG).decode(), f"{way}.png")
        browser.find(f".composer .pictures img[alt='{way}.png']")
    browser.ask("And now?")
    browser.until(lambda: len(gateway.pipeline.submitted) == 2, "the second question")
    assert last_message(gateway).parts == (ImageFile(PNG), ImageFile(PNG), "And now?")
    assert browser.problems() == []


def test_a_file_that_is_too_large_or_no_image_is_named(browser: Browser, tmp_path: Path) -> None:
    browser.open("chat")
    for name, content, words in (("large.png", PNG + bytes(1000), "may have"), ("a.txt", b"x", "is not a JPEG")):
        (tmp_path / name).write_bytes(content)
        browser.find("input[type=file]").send_keys(str(tmp_path / name))
        browser.shows(f"{name} ")
        browser.shows(words)
