from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

from common.errors import ConfigurationError
from common.settings import Settings, load_settings, parse_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def parse(*argv: str, environ: dict[str, str] | None = None) -> Settings:
    return parse_settings(argparse.ArgumentParser(), argv, environ or {})[0]


def test_defaults_need_nothing() -> None:
    settings = parse()
    assert settings.gateway.port == 8000
    assert settings.model.name == "smollm2-135m-instruct"


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "pando.toml"
    file.write_text("[scheduler]\nmax_rows = 3\npage_size = 8\nmax_step_tokens = 30\n")
    environ = {"PANDO_SCHEDULER__PAGE_SIZE": "32", "PANDO_SCHEDULER__MAX_STEP_TOKENS": "40"}
    settings = parse("--config", str(file), "--scheduler.max_step_tokens", "50", environ=environ)
    scheduler = settings.scheduler
    assert (scheduler.max_rows, scheduler.page_size, scheduler.max_step_tokens) == (3, 32, 50)


def test_sections_within_a_section_are_merged_over_the_sources(tmp_path: Path) -> None:
    file = tmp_path / "pando.toml"
    file.write_text('[scheduler.cache]\nmode = "shared"\neviction = "lfu"\nepoch_seconds = 3\n')
    environ = {"PANDO_SCHEDULER__CACHE__EVICTION": "slru", "PANDO_SCHEDULER__CACHE__EPOCH_SECONDS": "4"}
    cache = parse("--config", str(file), "--scheduler.cache.epoch_seconds", "5", environ=environ).scheduler.cache
    assert (cache.mode, cache.eviction, cache.epoch_seconds) == ("shared", "slru", 5)


@pytest.mark.parametrize("text", ["a:1,dns:b:2", "a:1, dns:b:2", '["a:1", "dns:b:2"]'])
def test_addresses_are_separated_by_commas_or_json(text: str, tmp_path: Path) -> None:
    expected = ("a:1", "dns:b:2")
    assert parse("--tokenizer.schedulers", text).tokenizer.schedulers == expected
    assert parse(environ={"PANDO_SCHEDULER__WORKERS": text}).scheduler.workers == expected
    file = tmp_path / "pando.toml"
    file.write_text(f"[gateway]\nschedulers = '{text}'\n")
    assert parse("--config", str(file)).gateway.schedulers == expected


def test_only_the_given_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANDO_SCHEDULER__MAX_ROWS", "3")
    assert parse().scheduler.max_rows == 64
    assert parse_settings(argparse.ArgumentParser(), [])[0].scheduler.max_rows == 3


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "pando.toml"
    file.write_text("[gateway]\nport = 81\n")
    assert parse(environ={"PANDO_CONFIG": str(file)}).gateway.port == 81


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[scheduler]\nmax_row = 3\n", "unknown setting: scheduler.max_row"),
        ("[schedular]\nmax_rows = 3\n", "unknown setting: schedular"),
        ("[scheduler]\nmax_rows = 0\n", "scheduler.max_rows: should be greater than or equal to 1"),
        ("[scheduler]\nmax_rows = many\n", "pando.toml"),
        ("[scheduler.data_parallel]\nrank = 3\n", "^scheduler: data_parallel.rank 3 must be below"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "pando.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        parse("--config", str(file))


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not found"):
        parse("--config", "/nowhere/pando.toml")


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="PANDO_SCHEDULER__MAX_ROW"):
        parse(environ={"PANDO_SCHEDULER__MAX_ROW": "3"})


def test_variables_that_a_cluster_injects_are_ignored() -> None:
    parse(environ={"PANDO_GATEWAY_SERVICE_HOST": "10.0.0.1", "PANDO_GATEWAY_PORT": "tcp://10.0.0.1:80"})


def test_an_unknown_flag_or_value_ends_the_process_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings("pando", "", ["--scheduler.max_rows", "0"], {})
    assert ended.value.code == 2
    assert "scheduler.max_rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--scheduler.max_row", "scheduler.max_rows"),
        ("--scheduler.max-rows", "scheduler.max_rows"),
        ("--max-rows", "scheduler.max_rows"),
        ("--worker.kv_dtype", "model.kv_dtype"),
        ("--scheduler.promotion_subjects", "scheduler.cache.promotion_subjects"),
    ],
)
def test_an_unknown_flag_is_refused_in_one_line_that_suggests_a_similar_one(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings("pando", "", [flag, "1"], {})
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"did you mean {meant}?" in line


def test_a_flag_that_resembles_none_is_refused_without_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings("pando", "", ["--enforce-eager"], {})
    assert "unrecognized arguments: --enforce-eager; --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rpc.token", "hush-hush"], "at least 16"),
        (["--rpc.token", "hush-hush-hush-hush", "--rpc.plaintext", "true"], "rpc.token requires TLS"),
        (["--scheduler.storage.secret", "hush-hush"], "scheduler.storage.secret: .*at least 32"),
    ],
)
def test_an_invalid_secret_is_not_shown_in_the_error(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        parse(*flags)
    assert "hush" not in str(refused.value)


def test_a_password_in_an_address_is_not_shown_in_the_error() -> None:
    with pytest.raises(ConfigurationError, match=r"got 'redis://\*\*\*@cache:6379'"):
        parse("--gateway.port", "redis://user:hush@cache:6379")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().scheduler.max_rows = 3  # type: ignore[misc]  # that it is refused is the point


def test_every_default_may_be_given_as_a_flag_and_in_the_environment() -> None:
    plain = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in scalar_defaults(Settings())
    }
    assert len(plain) > 120
    assert parse(*(f"--{name}={value}" for name, value in plain.items())).model_dump() == Settings().model_dump()
    environ = {f"PANDO_{name.upper().replace('.', '__')}": value for name, value in plain.items()}
    assert parse(environ=environ).model_dump() == Settings().model_dump()


def scalar_defaults(section: BaseModel, path: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Yield the full names and the defaults of all settings that are single values."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from scalar_defaults(value, f"{path}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{path}{name}", value
