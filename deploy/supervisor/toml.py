"""Serialization of settings as the TOML file that a supervised service reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

if TYPE_CHECKING:
    from common.settings import Settings


def dump_settings(settings: Settings) -> str:
    """Return TOML that parses to `settings`, with secrets in plain text and without absent optional values."""
    lines: list[str] = []
    for section, values in settings.model_dump(exclude_none=True).items():
        lines.append(f"[{_string(section)}]")
        lines.extend(f"{_string(name)} = {_value(value)}" for name, value in values.items())
        lines.append("")
    return "\n".join(lines)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            return _string(str(value))
        case SecretStr():
            return _string(value.get_secret_value())
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case dict():
            return "{" + ", ".join(f"{_string(str(name))} = {_value(item)}" for name, item in value.items()) + "}"
        case _:
            raise TypeError(f"TOML has no form for {type(value).__name__}")


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, except that TOML requires DEL to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
