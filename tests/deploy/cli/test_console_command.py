from __future__ import annotations

import webbrowser
from unittest.mock import Mock

import pytest

from deploy.cli import main

URL = "http://127.0.0.1:8123"


@pytest.mark.parametrize("url", [URL, f"{URL}/", f"{URL}/v1"])
def test_the_console_of_a_gateway_is_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Mock(return_value=True)
    monkeypatch.setattr(webbrowser, "open", browser)
    assert main(["console", "--url", url]) == 0
    browser.assert_called_once_with(f"{URL}/console")


@pytest.mark.parametrize("arguments", [[], ["--print"]])
def test_without_a_browser_the_address_is_printed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _address: False)
    assert main(["console", "--url", URL, *arguments]) == 0
    assert capsys.readouterr().out == f"{URL}/console\n"
