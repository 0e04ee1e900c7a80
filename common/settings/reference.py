"""The settings reference: name, type, default, meaning and environment variable of each, derived from the schema.

`pando up --help` and `docs/configuration.md` are rendered from it.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr

from common.settings.schema import PREFIX, Settings
from common.settings.sources import section_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

ABSENT = "absent"
# Placeholder for a key that the operator chooses, as in models.NAME.tp.
KEY = "NAME"
PLAIN_TYPES: dict[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "path",
    SecretStr: "secret string",
    Any: "any",
}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `variable` is None if no environment variable can set it."""

    name: str
    kind: str
    default: str
    meaning: str
    variable: str | None


@dataclass(frozen=True, slots=True)
class SettingsGroup:
    """The settings that one class of the schema defines; a section may have several groups."""

    section: str
    meaning: str
    settings: tuple[Setting, ...]


def describe_settings() -> list[SettingsGroup]:
    """Return all settings, in the order of the schema."""
    return list(_groups_of(Settings, "", {name: Settings.model_fields[name] for name in Settings.model_fields}))


def _groups_of(owner: type[BaseModel], path: str, fields: dict[str, FieldInfo]) -> Iterator[SettingsGroup]:
    """Yield the groups that `fields` of `owner` define at `path`, then those of nested sections."""
    for definer in reversed(owner.__mro__):
        own = {name: field for name, field in fields.items() if name in vars(definer).get("__annotations__", {})}
        plain = {name: field for name, field in own.items() if section_of(field.annotation) is None}
        if plain:
            settings = tuple(_describe(f"{path}{name}", field) for name, field in plain.items())
            yield SettingsGroup(path.rstrip("."), _first_paragraph(definer.__doc__), settings)
        for name, field in own.items():
            section = section_of(field.annotation)
            if section is not None:
                yield from _groups_of(section, f"{path}{name}.", section.model_fields)
            elif (each := _section_of_each(field.annotation)) is not None:
                # Inherited fields are described with the class that defines them.
                local = {key: each.model_fields[key] for key in vars(each).get("__annotations__", {})}
                yield from _groups_of(each, f"{path}{name}.{KEY}.", local)


def _describe(name: str, field: FieldInfo) -> Setting:
    variable = None if KEY in name.split(".") else f"{PREFIX}{name}".replace(".", "__").upper()
    default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
    return Setting(
        name, _kind(field.annotation, field.metadata), default, " ".join((field.description or "").split()), variable
    )


def _section_of_each(annotation: object) -> type[BaseModel] | None:
    """Return the section class of a table's values; None if the annotation is not a table of sections."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def _kind(annotation: object, metadata: list[Any]) -> str:  # Any: constraints of several libraries
    """Return a type and its bounds in words."""
    bounds = [
        f"{symbol} {getattr(constraint, name):g}"
        for constraint in metadata
        for name, symbol in BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    return " ".join([_type_in_words(annotation), ", ".join(bounds)]).strip()


def _type_in_words(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_in_words(arguments[0])
    if origin is Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_in_words(each) for each in arguments if each is not types.NoneType)
    if origin is tuple:
        return f"list of {_type_in_words(arguments[0])}"
    if origin is dict:
        return f"table of {_type_in_words(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(f"`{value.value}`" for value in annotation)
    return "tables" if section_of(annotation) else PLAIN_TYPES[annotation]


def _default(value: object) -> str:
    match value:
        case None:
            return ABSENT
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"`{value:.6g}`"
        case tuple() | dict() if not value:
            return "none"
        case tuple():
            return ", ".join(f"`{item}`" for item in value)
    return f"`{value}`"


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split())
