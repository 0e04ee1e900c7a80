"""`model.chat_template`: a file, or the text itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.chat_template import MAX_BYTES, read_chat_template
from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_a_template_is_the_text_itself_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEXT + " für alle", encoding="utf-8")
    assert read_chat_template(TEXT) == TEXT
    assert read_chat_template(str(file)) == TEXT + " für alle"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "there is no file"),
        (b"Hello", "is no Jinja template"),
        (b"{{ \xff }}", "cannot be read"),
        (b"{{ messages }}" + b" " * MAX_BYTES, "at most"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=problem):
        read_chat_template(str(file))


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_chat_template(str(tmp_path))
