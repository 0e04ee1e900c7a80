"""Secrets in settings, given directly or by a file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from common.errors import ConfigurationError
from common.section import read_secret
from common.settings import parse_settings

if TYPE_CHECKING:
    from pathlib import Path

NAME = "rpc.token"


def test_a_secret_is_the_value_or_the_content_of_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" open-sesame-please\n")
    assert read_secret(NAME, None) is None
    assert read_secret(NAME, SecretStr("open-sesame-please")) == "open-sesame-please"
    assert read_secret(NAME, SecretStr(f"file:{tmp_path}/token")) == "open-sesame-please"


@pytest.mark.parametrize(("content", "reason"), [(" \n", "is empty"), ("short", "at least 16"), (None, "No such file")])
def test_a_wrong_file_is_an_error_that_names_the_setting(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=rf"rpc\.token.*{reason}") as raised:
        read_secret(NAME, SecretStr(f"file:{file}"), 16)
    assert "short" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "length"), [("rpc.token", 16), ("gateway.state.secret", 32), ("scheduler.storage.secret", 32)]
)
def test_a_short_secret_is_refused_unless_it_names_a_file(name: str, length: int) -> None:
    variable = f"PANDO_{name}".replace(".", "__").upper()

    def parse(value: str) -> None:
        parse_settings(argparse.ArgumentParser(), [], {variable: value})

    with pytest.raises(ConfigurationError, match=f"at least {length}") as raised:
        parse("x" * (length - 1))
    assert "xxx" not in str(raised.value)
    if name != "rpc.token":  # which requires certificates, too
        parse("x" * length)
        # Only the services that use it read the file, so others start without.
        parse("file:/x")
