"""The base class of all configuration sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: immutable; unknown names are errors; attribute docstrings are the help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
