"""Secrets in settings: a value, or `file:PATH`, as others may be able to read the environment or the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import SecretStr

FILE_PREFIX = "file:"


def read_secret(setting: str, value: SecretStr | None, min_length: int = 1) -> str | None:
    """Return the secret that `setting` has or whose file it names; None if it is not set.

    Only the services that use a secret read its file, so that the others need no access to it.

    Raises:
        ConfigurationError: the file is not readable, or the secret has fewer than `min_length` characters.
    """
    if value is None:
        return None
    text = value.get_secret_value()
    if text.startswith(FILE_PREFIX):
        path = Path(text.removeprefix(FILE_PREFIX))
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{setting}: {error}") from error
        if not text:
            raise ConfigurationError(f"{setting}: {path} is empty")
    if len(text) < min_length:
        raise ConfigurationError(f"{setting} should have at least {min_length} characters")
    return text
