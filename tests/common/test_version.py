from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from common.version import version

if TYPE_CHECKING:
    import pytest


def test_the_version_is_that_of_the_installed_package() -> None:
    assert version() == metadata.version("pando")


def test_without_an_installed_package_the_version_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(_name: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", not_installed)
    assert version() == "unknown"
    monkeypatch.setenv("PANDO_VERSION", "1.2.3")
    assert version() == "1.2.3"
