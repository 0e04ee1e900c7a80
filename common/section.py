"""The base class of all configuration sections, types of settings that several sections have, secrets in settings.

A secret is a value or `file:PATH`, as others may be able to read the environment or the command line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr, WithJsonSchema
from pydantic_settings import NoDecode

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

FILE_PREFIX = "file:"


class Section(BaseModel):
    """Base of all sections: immutable; unknown names are errors; attribute docstrings are the help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _split(value: object) -> object:
    """Return the items of a list that is written as text: separated by commas, or as JSON."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [item.strip() for item in value.split(",") if item.strip()]


_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
# Addresses of services: a list, or its items in one string, separated by commas.
Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), WithJsonSchema(_TEXT_OR_TEXTS)]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Refuses a secret of fewer than `min_length` characters. That of a file is checked where it is read."""

    min_length: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def _check(self, secret: Any) -> Any:  # Any: SecretStr or None
        if isinstance(secret, SecretStr):
            text = secret.get_secret_value()
            if not text.startswith(FILE_PREFIX) and len(text) < self.min_length:
                raise ValueError(f"should have at least {self.min_length} characters")
        return secret


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
