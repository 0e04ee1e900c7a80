"""Reading of the configuration from its sources, with error messages for invalid values and unknown keys.

Sources, in order of precedence: command-line flags (`--scheduler.max_rows 32`), the environment
(`PANDO_SCHEDULER__MAX_ROWS=32`), the TOML file named by `--config` or `PANDO_CONFIG`, the schema's defaults. Unknown
keys are errors in each of them; old names are translated, with a warning on standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
)

from common.errors import ConfigurationError
from common.settings.renamed import OldNames
from common.settings.schema import PREFIX, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    names = OldNames(PREFIX)
    environ = names.in_environment(os.environ if environ is None else environ)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings (or {CONFIG_VARIABLE})")
    flags: CliSettingsSource[Any] = CliSettingsSource(
        Settings, root_parser=parser, cli_parse_args=None, cli_hide_none_type=True, cli_avoid_json=True
    )
    arguments = parser.parse_args(names.in_arguments(argv))
    file = arguments.config or environ.get(CONFIG_VARIABLE)
    check_environment(environ)
    try:
        flags = flags(parsed_args=arguments)
    except ValueError as error:  # a flag for a table whose value is not a table
        raise ConfigurationError(str(error)) from error
    settings = _build(flags, environ, names.in_table(_read(Path(file))) if file else {}, file)
    names.report(parser.prog)
    return settings, arguments


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable of the form PANDO_SECTION__FIELD that is not a setting."""
    settings = known_settings()
    sections = {name.rpartition(".")[0] for name in settings}  # as JSON
    known = {f"{PREFIX}{name}".replace(".", "__").upper() for name in (*settings, *sections)}
    for name in environ:
        if name.startswith(PREFIX) and "__" in name and name not in known:
            hint = suggestion(name.removeprefix(PREFIX).replace("__", ".").lower())
            raise ConfigurationError(f"unknown setting in the environment: {name}{hint}")


def known_settings() -> list[str]:
    """Return the names of all settings in sections, as section.field or section.section.field."""
    return [name for name in _names(Settings) if "." in name]


def _names(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield f"{path}{name}"
        else:
            yield from _names(section, f"{path}{name}.")


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section class that a field has as its type; None if it is no section."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def suggestion(name: str) -> str:
    """Return " (did you mean X?)" with the setting most similar to `name`; empty if none is similar."""
    known, plain = known_settings(), name.replace("-", "_")
    near = get_close_matches(plain, known, n=1, cutoff=0.8) if "." in plain else []
    near += [full for full in known if full.rpartition(".")[2] == plain.rpartition(".")[2]]
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""


def _read(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"configuration file not found: {file}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}") from error


def _build(
    flags: CliSettingsSource[Any], environ: Mapping[str, str], table: dict[str, Any], file: str | None
) -> Settings:
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
            assert isinstance(env_settings, EnvSettingsSource)
            env_settings.env_vars = {name.lower(): value for name, value in environ.items()}
            return (cls.layers, env_settings, InitSettingsSource(settings_cls, table))

    try:
        return Layered()
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from error
    except ValueError as error:  # a value that is not JSON
        raise ConfigurationError(f"{file or 'settings'}: {error}") from error


def explain(error: ValidationError, section: str = "") -> str:
    """Return one message per invalid setting, joined by "; ". Secrets are not shown.

    Names in `error` are relative to `section`.
    """
    path = f"{section}." if section else ""
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            lines.append(f"unknown setting: {name}{suggestion(name)}")
        else:
            # pydantic's own errors begin with "Input", those of validators here with "Value error".
            problem = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
            lines.append(
                (f"{name}: " if name else "")
                + problem
                + (f" (got {shown(detail['input'])})" if may_be_shown(f"{path}{name}", detail["input"]) else "")
            )
    return "; ".join(lines)


def shown(value: object) -> str:
    """Return a value as messages show it: credentials in URLs are replaced."""
    return re.sub(r"(://)[^\s/]*@", r"\1***@", repr(value))


def may_be_shown(name: str, value: object) -> bool:
    """Whether messages may show the value of setting `name`: not if it is a secret or a table that may contain one."""
    section: type[BaseModel] | None = Settings
    for part in name.split("."):
        if section is None or part not in section.model_fields:
            break
        annotation = section.model_fields[part].annotation
        if "SecretStr" in str(annotation):
            return False
        section = section_of(annotation)
    return not isinstance(value, dict)
