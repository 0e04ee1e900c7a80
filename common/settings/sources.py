"""Reads the configuration: which sources there are, and what becomes of what they get wrong.

Sources, strongest first: command-line flags (`--scheduler.max_rows 32`), environment (`PANDO_SCHEDULER__MAX_ROWS=32`),
the TOML file named by `--config` or `PANDO_CONFIG`, the schema's defaults. Unknown keys are errors in each of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, TomlConfigSettingsSource

from common.errors import ConfigurationError
from common.settings.schema import PREFIX, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIG_VARIABLE = "PANDO_CONFIG"


def load_settings(
    program: str, description: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings of a process from flags, environment and file; exit with a clear message if they are wrong."""
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    try:
        return parse_settings(parser, sys.argv[1:] if argv is None else argv, environ)[0]
    except ConfigurationError as error:
        parser.exit(2, f"{program}: {error}\n")


def parse_settings(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Settings, argparse.Namespace]:
    """Add the schema's flags to `parser`, parse `argv`, and return settings and the parser's own arguments.

    Raises:
        ConfigurationError: a key is unknown or a value does not fit; the message names it.
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
    except ValueError as error:  # a flag of a table that is no table
        raise ConfigurationError(str(error)) from error
    return _build(flags, Path(file) if file else None), arguments


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable that looks like a setting (PANDO_SECTION__FIELD) but is none."""
    known = {
        f"{PREFIX}{section}__{name}".upper()
        for section, field in Settings.model_fields.items()
        for name in getattr(field.annotation, "model_fields", {})
    }
    for name in environ:
        if name.startswith(PREFIX) and "__" in name and name not in known:
            raise ConfigurationError(f"unknown setting in the environment: {name}")


def _build(flags: CliSettingsSource[Any], file: Path | None) -> Settings:
    if file is not None and not file.is_file():
        raise ConfigurationError(f"configuration file not found: {file}")

    class Layered(Settings):
        """Settings with this process's own sources."""

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
            """Order the sources, strongest first."""
            sources: tuple[PydanticBaseSettingsSource, ...] = (cls.layers, env_settings)
            return (*sources, TomlConfigSettingsSource(settings_cls, file)) if file else sources

    try:
        return Layered()
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from error
    except ValueError as error:  # a TOML syntax error, or a value that is no JSON
        raise ConfigurationError(f"{file or 'settings'}: {error}") from error


def explain(error: ValidationError) -> str:
    """Return one line per wrong setting."""
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        unknown = detail["type"] == "extra_forbidden"
        lines.append(f"unknown setting: {name}" if unknown else f"{name}: {detail['msg']} (got {detail['input']!r})")
    return "; ".join(lines)
