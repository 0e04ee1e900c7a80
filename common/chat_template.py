"""The chat template that an operator gives in place of the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from common.errors import ConfigurationError

# Published ones have up to some 20 kB.
MAX_BYTES: Final = 1024 * 1024
_JINJA: Final = ("{{", "{%")


def read_chat_template(setting: str) -> str:
    """Return the Jinja text of `model.chat_template`, which is the text itself or the path of a file with it.

    Raises:
        ConfigurationError: there is no such file, it cannot be read, or it is no template.
    """
    if is_jinja(setting):
        return setting
    path = Path(setting).expanduser()
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigurationError(f"model.chat_template: {path} has {size} bytes, at most {MAX_BYTES} are possible")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"model.chat_template: there is no file {path}; a template given as text contains {{{{ or {{%"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model.chat_template: {path} cannot be read: {error}") from error
    if not is_jinja(text):
        raise ConfigurationError(f"model.chat_template: {path} is no Jinja template: it contains neither {{{{ nor {{%")
    return text


def is_jinja(text: str) -> bool:
    """Whether a text contains marks of Jinja, without which no template writes a message."""
    return any(mark in text for mark in _JINJA)
