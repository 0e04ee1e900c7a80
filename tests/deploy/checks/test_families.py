"""The tables of families and formats are written between their marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.checks import families

if TYPE_CHECKING:
    from pathlib import Path


def test_drift_fails_the_check_and_writing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [tmp_path / name for name in families.TABLES]
    for page in pages:
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"before\n{families.BEGIN}{families.END}after\n")
    monkeypatch.setattr(families, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["families", "--check"])
    assert families.main() == 1
    assert capsys.readouterr().err.count(families.COMMAND) == len(pages) == 2
    monkeypatch.setattr("sys.argv", ["families"])
    assert families.main() == 0
    for page, row in zip(
        pages, ("| Qwen3 | `qwen3`, `qwen3_vl` | `qwen3` |", "| gpt-oss | yes | in BF16 | not experts |"), strict=True
    ):
        assert page.read_text().startswith("before\n")
        assert page.read_text().endswith("after\n")
        assert row in page.read_text()
    monkeypatch.setattr("sys.argv", ["families", "--check"])
    assert families.main() == 0


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table"):
        families.with_table("no marks", ())
