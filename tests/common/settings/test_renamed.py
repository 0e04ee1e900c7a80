"""Old names of settings, which are accepted for one version, in each source."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigurationError
from common.section import read_secret
from common.settings import PREFIX, Settings, parse_settings
from common.settings.renamed import FILES, KEY, OF_MODELS, REMOVED, RENAMED, OldNames
from common.settings.sources import known_settings


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
    assert {new for new in RENAMED.values() if KEY not in new} <= known
    assert RENAMED.keys().isdisjoint(REMOVED)
    assert set(RENAMED) >= FILES
    assert set(OF_MODELS) < set(Settings.model_fields)


@pytest.mark.parametrize("flags", [["--scheduler.policy", "lpm"], ["--scheduler.policy=lpm"]])
def test_old_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(*flags).scheduler.queue.policy == "lpm"
    (warning,) = warnings(capsys)
    assert warning.startswith("pando: warning: scheduler.policy is now scheduler.queue.policy;")


def test_old_variables(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PANDO_SCHEDULER__CACHE_EVICTION": "lfu", "PANDO_GATEWAY__JWT_ISSUER": "https://id", "HOME": "/"}
    settings = parse(environ=environ)
    assert settings.scheduler.cache.eviction == "lfu"
    assert settings.gateway.jwt.issuer == "https://id"
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


def test_one_setting_replaces_those_of_several_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
    text = "".join(f'[{section}]\nmetrics_host = "0.0.0.0"\n' for section in sections)
    assert from_file(tmp_path, text).metrics.host == "0.0.0.0"
    assert len(warnings(capsys)) == len(sections)
    in_environment = {f"PANDO_{section.upper()}__METRICS_HOST": "::" for section in sections}
    assert parse(environ=in_environment).metrics.host == "::"
    assert parse("--gateway.limits_file", "a.toml", "--scheduler.limits_file=a.toml").limits.file == Path("a.toml")
    in_json = parse(environ={"PANDO_WORKER": '{"metrics_host": "::1", "threads": 3}'})
    assert (in_json.metrics.host, in_json.worker.threads) == ("::1", 3)
    of_model = from_file(tmp_path, '[models.a.worker]\nmetrics_host = "::"\nthreads = 2\n')
    assert (of_model.metrics.host, of_model.models["a"].worker) == ("::", {"threads": 2})


def test_one_setting_cannot_have_the_values_of_several_services(tmp_path: Path) -> None:
    text = '[gateway]\nlimits_file = "a.toml"\n[scheduler]\nlimits_file = "b.toml"\n'
    with pytest.raises(ConfigurationError, match=r"give only limits\.file"):
        from_file(tmp_path, text)
    with pytest.raises(ConfigurationError, match=r"give only limits\.file"):
        parse("--gateway.limits_file", "a.toml", "--scheduler.limits_file", "b.toml")
    with pytest.raises(ConfigurationError, match=r"give only limits\.file"):
        from_file(tmp_path, '[gateway]\nlimits_file = "a.toml"\n[limits]\nfile = "b.toml"\n')


def test_old_names_of_files_with_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("open-sesame-please\n")
    path = str(tmp_path / "secret")
    by_flag = parse("--scheduler.admin_token_file", path).scheduler.admin_token
    assert read_secret("scheduler.admin_token", by_flag) == "open-sesame-please"
    assert "file:PATH" in warnings(capsys)[0]
    of_gateway = parse(environ={"PANDO_GATEWAY__SCHEDULER_ADMIN_TOKEN": f"file:{path}"}).scheduler.admin_token
    assert read_secret("scheduler.admin_token", of_gateway) == "open-sesame-please"
    by_variable = parse(environ={"PANDO_GATEWAY__STATE__URL_FILE": path}).gateway.state.url
    assert read_secret("gateway.state.url", by_variable) == "open-sesame-please"
    in_file = from_file(tmp_path, f'[gateway]\nstate_secret_file = "{path}"\n').gateway.state.secret
    assert read_secret("gateway.state.secret", in_file) == "open-sesame-please"
    with pytest.raises(ConfigurationError, match=r"give only gateway\.state\.url"):
        from_file(tmp_path, f'[gateway.state]\nurl = "redis://a"\nurl_file = "{path}"\n')


def test_a_single_scheduler_is_a_list_of_one(tmp_path: Path) -> None:
    assert parse("--tokenizer.scheduler", "a:1").tokenizer.schedulers == ("a:1",)
    assert parse(environ={"PANDO_GATEWAY__SCHEDULER": "a:1"}).gateway.schedulers == ("a:1",)
    backend = '"tokenizer": "t:1", "detokenizer": "d:1", "scheduler": "s:1"'
    models = parse(environ={"PANDO_GATEWAY__MODELS": f'{{"org/a": {{{backend}}}}}'}).gateway.models
    assert models["org/a"].schedulers == ("s:1",)
    table = '[gateway.models."org/a"]\ntokenizer = "t:1"\ndetokenizer = "d:1"\nscheduler = "s:1"\n'
    assert from_file(tmp_path, table).gateway.models == models


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
        parse(environ={"PANDO_SCHEDULER__POLICY": "lpm", "PANDO_SCHEDULER__QUEUE__POLICY": "fcfs"})
    with pytest.raises(ConfigurationError, match=r"give only scheduler\.queue\.policy"):
        from_file(tmp_path, '[scheduler]\npolicy = "lpm"\n[scheduler.queue]\npolicy = "fcfs"\n')


def test_both_names_may_have_the_same_value_so_that_one_file_serves_two_versions(tmp_path: Path) -> None:
    environ = {"PANDO_SCHEDULER__POLICY": "lpm", "PANDO_SCHEDULER__QUEUE__POLICY": "lpm"}
    assert parse(environ=environ).scheduler.queue.policy == "lpm"
    both = '[scheduler]\npolicy = "lpm"\n[scheduler.queue]\npolicy = "lpm"\n'
    assert from_file(tmp_path, both).scheduler.queue.policy == "lpm"


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


def test_removed_settings_have_no_effect_in_any_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them at once in each source: to parse the settings takes most of the time."""
    assert len(REMOVED) > 50
    flags, environ, tables = [], {}, dict[str, Any]()
    lines = []
    for name in REMOVED:
        section, _, key = name.rpartition(".")
        flags += [f"--{name}", "1"]
        environ[f"{PREFIX}{name}".replace(".", "__").upper()] = "1"
        table = tables
        for part in section.split("."):
            table = table.setdefault(part, {})
        table[key] = 1
        lines.append(f"{name} = 1\n")
    as_json = [text for section, table in tables.items() for text in (f"--{section}", json.dumps(table))]
    unchanged = Settings().model_dump()
    expected = sorted(
        f"pando: warning: {name} has no effect: {reason}; the next version will refuse it"
        for name, reason in REMOVED.items()
    )
    assert parse(*flags).model_dump() == unchanged
    assert sorted(warnings(capsys)) == expected
    assert parse(environ=environ).model_dump() == unchanged
    assert sorted(warnings(capsys)) == expected
    assert parse(*as_json).model_dump() == unchanged
    assert sorted(warnings(capsys)) == expected
    assert from_file(tmp_path, "".join(lines)).model_dump() == unchanged
    assert sorted(warnings(capsys)) == expected


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
