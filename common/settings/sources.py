"""Reading of the configuration from its sources, with error messages for invalid values and unknown keys.

Sources, in order of precedence: command-line flags (`--scheduler.max_rows 32`), the environment
(`PANDO_SCHEDULER__MAX_ROWS=32`), the TOML file named by `--config` or `PANDO_CONFIG`, the schema's defaults. Unknown
keys are errors in each of them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, TomlConfigSettingsSource

from common.errors import ConfigurationError
from common.settings.schema import PREFIX, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIG_VARIABLE = "PANDO_CONFIG"


class SettingsParser(argparse.ArgumentParser):
    """A parser that reports an error in one line: the usage of more than a hundred flags would bury it."""

    all_flags_option = "--help"
    """The option that lists all flags, for error messages."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and `message`, with suggestions for unknown flags."""
        hints = "".join(suggestion(flag) for flag in re.findall(r"--([\w.-]+)", message))
        self.exit(2, f"{self.prog}: {message}{hints}; {self.all_flags_option} lists all\n")


def load_settings(
    program: str, description: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings of a process from flags, environment and file; exit with status 2 if they are invalid."""
    parser = SettingsParser(prog=program, description=description, allow_abbrev=False)
    try:
        return parse_settings(parser, sys.argv[1:] if argv is None else argv, environ)[0]
    except ConfigurationError as error:
        parser.exit(2, f"{program}: {error}\n")


def parse_settings(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Settings, argparse.Namespace]:
    """Add the schema's flags to `parser`, parse `argv`, and return the settings and the parser's own arguments.

    Raises:
        ConfigurationError: a key is unknown or a value is invalid; the message names it.
    """
    environ = os.environ if environ is None else environ
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings (or {CONFIG_VARIABLE})")
    flags: CliSettingsSource[Any] = CliSettingsSource(
        Settings, root_parser=parser, cli_parse_args=None, cli_hide_none_type=True, cli_avoid_json=True
    )
    arguments = parser.parse_args(list(argv))
    file = arguments.config or environ.get(CONFIG_VARIABLE)
    check_environment(environ)
    try:
        flags = flags(parsed_args=arguments)
    except ValueError as error:  # a flag for a table whose value is not a table
        raise ConfigurationError(str(error)) from error
    return _build(flags, Path(file) if file else None), arguments


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable of the form PANDO_SECTION__FIELD that is not a setting."""
    known = {f"{PREFIX}{name}".replace(".", "__").upper() for name in known_settings()}
    for name in environ:
        if name.startswith(PREFIX) and "__" in name and name not in known:
            hint = suggestion(name.removeprefix(PREFIX).replace("__", ".").lower())
            raise ConfigurationError(f"unknown setting in the environment: {name}{hint}")


def known_settings() -> list[str]:
    """Return the names of all settings, as section.field."""
    return [
        f"{section}.{name}"
        for section, field in Settings.model_fields.items()
        for name in getattr(field.annotation, "model_fields", {})
    ]


def suggestion(name: str) -> str:
    """Return " (did you mean X?)" with the setting most similar to `name`; empty if none is similar."""
    known, plain = known_settings(), name.replace("-", "_")
    near = get_close_matches(plain, known, n=1, cutoff=0.8) if "." in plain else []
    near += [full for full in known if full.partition(".")[2] == plain.rpartition(".")[2]]
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""


def _build(flags: CliSettingsSource[Any], file: Path | None) -> Settings:
    if file is not None and not file.is_file():
        raise ConfigurationError(f"configuration file not found: {file}")

    class Layered(Settings):
        """Settings that are read from the sources of this call."""

        layers: ClassVar[CliSettingsSource[Any]] = flags

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """Return the sources in order of precedence."""
            sources: tuple[PydanticBaseSettingsSource, ...] = (cls.layers, env_settings)
            return (*sources, TomlConfigSettingsSource(settings_cls, file)) if file else sources

    try:
        return Layered()
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from error
    except ValueError as error:  # a TOML syntax error, or a value that is not JSON
        raise ConfigurationError(f"{file or 'settings'}: {error}") from error


def explain(error: ValidationError) -> str:
    """Return one message per invalid setting, joined by "; ". Secrets are not shown."""
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            lines.append(f"unknown setting: {name}{suggestion(name)}")
        else:
            lines.append(
                f"{name}: {detail['msg']}"
                + (f" (got {detail['input']!r})" if may_be_shown(name, detail["input"]) else "")
            )
    return "; ".join(lines)


def may_be_shown(name: str, value: object) -> bool:
    """Whether messages may show the value of setting `name`: not if it is a secret or a table that may contain one."""
    section, _, field = name.partition(".")
    annotation = Settings.model_fields[section].annotation if section in Settings.model_fields else None
    fields = getattr(annotation, "model_fields", {})
    return not isinstance(value, dict) and not (field in fields and "SecretStr" in str(fields[field].annotation))
