"""Reading of objects that another version of the program has written, as during a rolling upgrade."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import Enum

E = TypeVar("E", bound="Enum")


def known_fields(kind: type[Any], written: Mapping[str, Any]) -> dict[str, Any]:  # Any: a dataclass; JSON
    """Return those entries of `written` that are fields of the dataclass `kind`; newer versions may have others."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in written.items() if name in names}


def known_member(written: str, otherwise: E) -> E:
    """Return the member with the value `written` of the enumeration of `otherwise`; `otherwise` if it has none."""
    return next((member for member in type(otherwise) if member.value == written), otherwise)
