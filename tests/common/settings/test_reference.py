"""The list of settings that the help and docs/configuration.md show."""

from __future__ import annotations

from common.settings import CONFIG_VARIABLE, check_environment
from common.settings.reference import describe_settings
from common.settings.sources import known_settings

SETTINGS = {setting.name: setting for group in describe_settings() for setting in group.settings}


def test_every_setting_is_described_once_with_a_meaning() -> None:
    listed = [setting.name for group in describe_settings() for setting in group.settings]
    assert len(listed) == len(set(listed))
    assert set(known_settings()) <= set(listed)
    assert [setting.name for setting in SETTINGS.values() if not setting.meaning] == []


def test_types_have_their_bounds_and_choices() -> None:
    assert SETTINGS["scheduler.max_rows"].kind == "integer ≥ 1, ≤ 4096"
    assert SETTINGS["log.format"].kind == "`auto` | `console` | `json`"
    assert SETTINGS["scheduler.workers"].kind == "list of string"
    assert SETTINGS["rpc.token"].kind == "secret string length ≥ 16"
    assert SETTINGS["gateway.allowed_hosts"].kind == "list of string"


def test_defaults_are_written_as_in_a_file() -> None:
    assert SETTINGS["rpc.plaintext"].default == "`false`"
    assert SETTINGS["gateway.keys_file"].default == "absent"
    assert SETTINGS["scheduler.workers"].default == "`127.0.0.1:50053`"
    assert SETTINGS["gateway.models.NAME.tokenizer"].default == "required"


def test_variables_are_those_that_are_read() -> None:
    variables = [setting.variable for setting in SETTINGS.values() if setting.variable]
    assert CONFIG_VARIABLE not in variables
    assert len(variables) > 100
    check_environment(dict.fromkeys(variables, ""))
    assert SETTINGS["models.NAME.tp"].variable is None
