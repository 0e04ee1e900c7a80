from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from common.version import version

if TYPE_CHECKING:
    import pytest


def test_what_is_installed_counts() -> None:
    assert version() == metadata.version("pando")


def test_an_image_that_installs_nothing_says_what_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(_name: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", not_installed)
    assert version() == "unknown"
    monkeypatch.setenv("PANDO_VERSION", "1.2.3")
    assert version() == "1.2.3"
