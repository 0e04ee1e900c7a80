"""`docs/configuration.md` says what the schema says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.settings.reference import Setting, SettingsGroup, describe_settings
from deploy.checks import configuration

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_page_has_not_drifted() -> None:
    assert configuration.FILE.read_text() == configuration.render(describe_settings())


def test_drift_fails_the_check_and_writing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(configuration, "FILE", tmp_path / "configuration.md")
    monkeypatch.setattr("sys.argv", ["configuration", "--check"])
    assert configuration.main() == 1
    assert configuration.COMMAND in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["configuration"])
    assert configuration.main() == 0
    monkeypatch.setattr("sys.argv", ["configuration", "--check"])
    assert configuration.main() == 0
    configuration.FILE.write_text(configuration.FILE.read_text().replace("| `128`", "| `129`") + "\n")
    assert configuration.main() == 1


def test_cells_cannot_end_a_column_or_begin_html() -> None:
    setting = Setting("a.b", "`x` | `y`", "`x`", "<think> | none", "PANDO_A__B")
    page = configuration.render([SettingsGroup("a", "What a is.", (setting,))])
    assert "| `a.b` | `x` \\| `y` | `x` | &lt;think> \\| none `PANDO_A__B` |\n" in page
