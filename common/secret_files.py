"""Secrets in settings: a value, or a file where others could read the environment or the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import SecretStr


def read_secret(setting: str, value: SecretStr | None, path: Path | None) -> str | None:
    """Return the secret from `value`, or from the file at `path` (`<setting>_file`); None if neither is set.

    Raises:
        ConfigurationError: both are set, or the file is not readable or empty.
    """
    if path is None:
        return None if value is None else value.get_secret_value()
    if value is not None:
        raise ConfigurationError(f"set either {setting} or {setting}_file, not both")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{setting}_file: {error}") from error
    if not text:
        raise ConfigurationError(f"{setting}_file: {path} is empty")
    return text
