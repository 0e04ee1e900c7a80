"""Chromium without a window, as tests of the console use it."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from selenium.webdriver.remote.webelement import WebElement

TIMEOUT_S = 240.0
WIDE, PHONE = (1280, 860), (390, 844)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--lang=en",
)
AXE = Path(__file__).with_name("axe.min.js")
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


class Browser:
    """One page of the console in a browser with an empty profile."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self._url = url

    def open(self, page: str, size: tuple[int, int] = WIDE, theme: str = "light") -> None:
        """Show a page of the console, loaded anew, at a size in CSS pixels."""
        self.look(size, theme)
        self.driver.get("about:blank")
        self.driver.get(f"{self._url}/console#{page}")
        self.find("main h1")

    def look(self, size: tuple[int, int] = WIDE, theme: str = "light") -> None:
        """Change the size, in CSS pixels, and the system's theme."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)

    def turn_to(self, page: str) -> None:
        """Follow the link of a page in the navigation."""
        self.find(f"nav a[href='#{page}']").click()
        self.find(f"nav a[href='#{page}'][aria-current]")

    def find(self, selector: str) -> WebElement:
        """Return the first element that matches, as soon as there is one."""
        element: WebElement = self.until(
            lambda: next(iter(self.driver.find_elements(By.CSS_SELECTOR, selector)), None), selector
        )
        return element

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a condition and return its value; its errors count as False, as a page may be redrawing."""
        waiting = WebDriverWait(self.driver, TIMEOUT_S, 0.1, ignored_exceptions=[Exception])
        return waiting.until(lambda _: condition(), f"{what}; the page: {self.text[:2000]}")

    @property
    def text(self) -> str:
        """The visible text of the page."""
        return str(self.run("return document.body.innerText"))

    def shows(self, text: str) -> None:
        """Wait until the page's text has `text`."""
        self.until(lambda: text.lower() in self.text.lower(), f"text {text!r}")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def click(self, text: str, within: str = "main") -> None:
        """Press the button that has this text."""
        script = (
            "return [...document.querySelectorAll(arguments[0] + ' button, ' + arguments[0] + ' summary')]"
            ".find((each) => each.textContent.trim() === arguments[1] && !each.disabled)"
        )
        self.until(lambda: self.run(script, within, text), f"button {text!r}").click()

    def ask(self, text: str) -> None:
        """Type a message in the chat and send it by keyboard."""
        draft = self.find("#draft")
        lines = text.split("\n")
        for number, line in enumerate(lines):
            draft.send_keys(line)
            if number + 1 < len(lines):
                draft.send_keys(Keys.SHIFT, Keys.ENTER)
        draft.send_keys(Keys.ENTER)

    def problems(self) -> list[str]:
        """Return what the browser has reported since the last call: errors, warnings, violations of the policy."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._log()]

    def _log(self) -> list[dict[str, str]]:
        entries: list[dict[str, str]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return entries

    def accessibility(self) -> list[str]:
        """Return each rule of axe that the page breaks, with the elements."""
        self.run(AXE.read_text())
        script = (
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {runOnly: [...arguments[0]]}).then((result) => done(result.violations))"
        )
        found = self.driver.execute_async_script(script, list(RULES))
        return [f"{each['id']}: {[(node['html'], node['failureSummary']) for node in each['nodes']]}" for each in found]

    def picture(self, path: Path) -> None:
        """Write what is on the screen; the pointer highlights nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 0, "y": 0})
        # Two frames, so that what was changed last is drawn.
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        assert self.driver.save_screenshot(str(path))


@contextmanager
def browsing(url: str, profile: Path) -> Iterator[Browser]:
    """Run a browser for the console at `url`; skip where there is none."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if not all(programs.values()):
        missing = [name for name, path in programs.items() if not path]
        pytest.skip(f"NOT tested in a browser: {missing} missing (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs["chromium"])
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs["chromedriver"]))
    driver.set_script_timeout(TIMEOUT_S)
    try:
        yield Browser(driver, url)
    finally:
        driver.quit()
