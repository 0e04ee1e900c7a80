"""Old names of settings, which are accepted for one version, in each source."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.settings import PREFIX, Settings, parse_settings
from common.settings.renamed import OF_MODELS, REMOVED, RENAMED, OldNames
from common.settings.sources import known_settings

if TYPE_CHECKING:
    from pathlib import Path


def parse(*argv: str, environ: dict[str, str] | None = None) -> Settings:
    return parse_settings(argparse.ArgumentParser(prog="pando"), argv, environ or {})[0]


def from_file(path: Path, text: str, *argv: str, environ: dict[str, str] | None = None) -> Settings:
    file = path / "pando.toml"
    file.write_text(text)
    return parse("--config", str(file), *argv, environ=environ)


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_old_names_are_no_settings_and_new_names_are() -> None:
    known = set(known_settings())
    assert known.isdisjoint({*RENAMED, *REMOVED})
    assert set(RENAMED.values()) <= known
    assert len(set(RENAMED.values())) == len(RENAMED)
    assert RENAMED.keys().isdisjoint(REMOVED)
    # Tables of single models are translated section by section.
    assert [old for old, new in RENAMED.items() if old.partition(".")[0] != new.partition(".")[0]] == []
    assert set(OF_MODELS) < set(Settings.model_fields)


@pytest.mark.parametrize("flags", [["--scheduler.policy", "lpm"], ["--scheduler.policy=lpm"]])
def test_old_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(*flags).scheduler.queue.policy == "lpm"
    (warning,) = warnings(capsys)
    assert warning.startswith("pando: warning: scheduler.policy is now scheduler.queue.policy;")


def test_old_variables(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PANDO_SCHEDULER__CACHE_EVICTION": "lfu", "PANDO_GATEWAY__JWT_ALGORITHMS": '["EdDSA"]', "HOME": "/"}
    settings = parse(environ=environ)
    assert settings.scheduler.cache.eviction == "lfu"
    assert settings.gateway.jwt.algorithms == ("EdDSA",)
    assert len(warnings(capsys)) == 2


def test_old_names_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
    [scheduler]
    cache = "isolated"
    cache_quota_share = 0.5
    max_waiting_requests = 7
    [worker]
    storage = "/var/lib/pando"
    storage_gigabytes = 3
    """
    settings = from_file(tmp_path, text)
    assert (settings.scheduler.cache.mode, settings.scheduler.cache.quota_share) == ("isolated", 0.5)
    assert settings.scheduler.queue.max_waiting_requests == 7
    assert settings.worker.storage.location is not None
    assert settings.worker.storage.location.get_secret_value() == "/var/lib/pando"
    assert settings.worker.storage.gigabytes == 3
    assert len(warnings(capsys)) == 5


@pytest.mark.parametrize("is_flag", [True, False])
def test_old_names_in_json(is_flag: bool, capsys: pytest.CaptureFixture[str]) -> None:
    section = json.dumps({"cache": "isolated", "session_limit": 3})
    models = json.dumps({"a": {"scheduler": {"cache": "chunk", "max_rows": 2}}, "b": "smollm2"})
    if is_flag:
        settings = parse("--scheduler", section, "--models", models)
    else:
        settings = parse(environ={"PANDO_SCHEDULER": section, "PANDO_MODELS": models})
    assert (settings.scheduler.cache.mode, settings.scheduler.sessions.limit) == ("isolated", 3)
    assert settings.models["a"].scheduler == {"cache": {"mode": "chunk"}, "max_rows": 2}
    assert settings.models["b"].reference == "smollm2"
    # `scheduler.cache` occurs twice.
    assert len(warnings(capsys)) == 2


def test_old_names_in_the_tables_of_single_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = from_file(tmp_path, '[models.a.worker]\nstorage = "/a"\n[models.a.tokenizer]\nrouting = "round_robin"\n')
    assert settings.models["a"].worker == {"storage": {"location": "/a"}}
    assert settings.models["a"].tokenizer == {"routing": {"policy": "round_robin"}}
    assert len(warnings(capsys)) == 2


@pytest.mark.parametrize("old", [name for name, new in RENAMED.items() if new.startswith(f"{name}.")])
def test_the_old_name_of_a_section_is_still_a_scalar_setting(old: str, tmp_path: Path) -> None:
    """Its new name is a table, which may be given as JSON under the same name."""
    section, _, name = old.partition(".")
    field = RENAMED[old].removeprefix(f"{old}.")
    value = {"scheduler.cache": "shared", "tokenizer.routing": "round_robin"}.get(old, "/directory")
    variable = f"{PREFIX}{old}".replace(".", "__").upper()
    expected = from_file(tmp_path, f'[{section}.{name}]\n{field} = "{value}"\n').model_dump(mode="json")
    as_json = json.dumps({field: value})
    assert parse(f"--{old}", value).model_dump(mode="json") == expected
    assert parse(f"--{old}", as_json).model_dump(mode="json") == expected
    assert parse(environ={variable: value}).model_dump(mode="json") == expected
    assert parse(environ={variable: as_json}).model_dump(mode="json") == expected
    assert from_file(tmp_path, f'[{section}]\n{name} = "{value}"\n').model_dump(mode="json") == expected


def test_new_names_are_accepted_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[scheduler.cache]\nmode = "shared"\n'
    settings = from_file(
        tmp_path, text, "--scheduler.queue.policy", "lpm", environ={"PANDO_WORKER__STORAGE__GIGABYTES": "2"}
    )
    assert settings.scheduler.cache.mode == "shared"
    assert warnings(capsys) == []


def test_there_is_one_warning_per_old_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PANDO_SCHEDULER__POLICY": "fcfs"}
    flags = ["--scheduler.policy", "priority", "--scheduler.policy", "lpm"]
    settings = from_file(tmp_path, '[scheduler]\npolicy = "fair"\n', *flags, environ=environ)
    assert settings.scheduler.queue.policy == "lpm"
    assert len(warnings(capsys)) == 1


def test_sources_keep_their_precedence_under_either_name(tmp_path: Path) -> None:
    new_in_file = '[scheduler.cache]\nmode = "isolated"\neviction = "lfu"\n'
    cache = from_file(tmp_path, new_in_file, "--scheduler.cache", "shared").scheduler.cache
    assert (cache.mode, cache.eviction) == ("shared", "lfu")
    old_in_file = '[scheduler]\ncache = "isolated"\n'
    environ = {"PANDO_SCHEDULER__CACHE__MODE": "chunk"}
    assert from_file(tmp_path, old_in_file, environ=environ).scheduler.cache.mode == "chunk"


def test_old_and_new_name_in_one_source_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"give only scheduler\.queue\.policy"):
        parse("--scheduler.policy", "lpm", "--scheduler.queue.policy", "lpm")
    with pytest.raises(ConfigurationError, match=r"give only scheduler\.cache\.mode"):
        parse("--scheduler.cache.mode=shared", "--scheduler.cache", "shared")
    with pytest.raises(ConfigurationError, match="PANDO_SCHEDULER__POLICY"):
        parse(environ={"PANDO_SCHEDULER__POLICY": "lpm", "PANDO_SCHEDULER__QUEUE__POLICY": "lpm"})
    with pytest.raises(ConfigurationError, match=r"give only scheduler\.queue\.policy"):
        from_file(tmp_path, '[scheduler]\npolicy = "lpm"\n[scheduler.queue]\npolicy = "lpm"\n')


def test_a_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"scheduler\.queue is not a table"):
        from_file(tmp_path, "[scheduler]\nqueue = 3\npolicy = 'lpm'\n")


def test_removed_settings_have_no_effect_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = from_file(
        tmp_path,
        "[scheduler]\ncache_hit_min = 1\n",
        "--scheduler.cache_jump_factor",
        "3",
        "--scheduler.max_rows",
        "5",
        environ={"PANDO_WORKER__FAKE_STEP_MS": "7"},
    )
    assert settings.scheduler.max_rows == 5
    assert settings.model_dump() == parse("--scheduler.max_rows", "5").model_dump()
    given = warnings(capsys)
    assert [warning.split()[2] for warning in given] == [
        "worker.fake_step_ms",
        "scheduler.cache_jump_factor",
        "scheduler.cache_hit_min",
    ]
    assert all("has no effect" in warning for warning in given)
    assert "PANDO_FAKE_STEP_MS" in given[0]


def test_values_are_still_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"scheduler\.queue\.policy"):
        parse("--scheduler.policy", "random")
    with pytest.raises(ConfigurationError, match=r"scheduler\.cache\.mode"):
        parse(environ={"PANDO_SCHEDULER__CACHE": "random"})


def test_a_missing_value_is_left_to_the_parser() -> None:
    with pytest.raises(SystemExit):
        parse("--scheduler.policy")


def test_what_is_given_is_not_changed() -> None:
    table = {"scheduler": {"policy": "lpm"}}
    assert OldNames(PREFIX).in_table(table) == {"scheduler": {"queue": {"policy": "lpm"}}}
    assert table == {"scheduler": {"policy": "lpm"}}
