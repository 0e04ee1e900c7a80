"""The table of families in `docs/models.md` is written between its marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.checks import families

if TYPE_CHECKING:
    from pathlib import Path


def test_drift_fails_the_check_and_writing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{families.BEGIN}{families.END}after\n")
    monkeypatch.setattr(families, "FILE", page)
    monkeypatch.setattr("sys.argv", ["families", "--check"])
    assert families.main() == 1
    assert families.COMMAND in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["families"])
    assert families.main() == 0
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert "| Qwen3 | `qwen3` | `qwen3` |" in page.read_text()
    monkeypatch.setattr("sys.argv", ["families", "--check"])
    assert families.main() == 0


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table"):
        families.with_table("no marks", ())
