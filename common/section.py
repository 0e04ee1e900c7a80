"""What all sections of the configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: immutable, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
