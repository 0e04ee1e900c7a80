"""The base class of all configuration sections, and the types of settings that several sections have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr
from pydantic_settings import NoDecode

from common.secrets import FILE_PREFIX

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler


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


# Addresses of services: a list, or its items in one string, separated by commas.
Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


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
