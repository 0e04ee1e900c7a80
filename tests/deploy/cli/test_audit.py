"""`pando audit` over logs that a gateway and a scheduler wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest

from common.audit.chain import AuditChain, files_of
from common.settings import CONFIG_VARIABLE
from deploy.cli.commands import main

if TYPE_CHECKING:
    from pathlib import Path

ACTOR = {"tenant": "ops", "subject": "user/olga", "credential": "key/k1"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of two chains, with records of two days."""
    directory = tmp_path / "audit"
    for service, day in (("gateway", "01"), ("scheduler", "02")):
        chain = AuditChain(directory, service, 1 << 20)
        for action in ("service.started", "cache.flush", "cache.promoted"):
            fields = {"time": f"2026-01-{day}T12:00:00+00:00", "service": service, "action": action}
            chain.append([{**fields, "outcome": "done", "actor": ACTOR, "what": {"freed_pages": 3}}], "")
        chain.close()
    return directory


def test_show_prints_all_records_by_time(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "show", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[1] == "2026-01-01T12:00:00+00:00 gateway 2 cache.flush done by ops/key/k1 freed_pages=3"
    assert "scheduler" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--since", "2026-01-02"], 3),
        (["--since", "2026-01-01T13:00:00+00:00", "--action", "cache.*"], 2),
        (["--action", "cache.flush"], 2),
        (["--since", "1h"], 0),
    ],
)
def test_show_selects_by_time_and_action(
    root: Path, arguments: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "show", str(root), "--json", *arguments]) == 0
    records = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == count
    assert all(record["actor"] == ACTOR for record in records)


def test_verify_reports_whole_chains_and_their_heads(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "records 1 to 3 are whole and in order; head 3:" in lines[0]


def test_verify_names_the_broken_record_and_exits_with_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = files_of(root / "gateway")
    path.write_bytes(path.read_bytes().replace(b"cache.flush", b"cache.flusH"))
    assert main(["audit", "verify", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "BROKEN" in lines[0]
    assert "record 2 has been changed" in lines[0]
    assert "whole" in lines[1]
    assert main(["audit", "verify", str(path)]) == 1


def test_verify_compares_a_recorded_head(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = str(root / "gateway")
    main(["audit", "verify", chain])
    head = capsys.readouterr().out.strip().rpartition(" ")[2]
    assert main(["audit", "verify", chain, "--head", head]) == 0
    assert main(["audit", "verify", chain, "--head", head[:14]]) == 0
    [path] = files_of(root / "gateway")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert main(["audit", "verify", chain]) == 0
    assert main(["audit", "verify", chain, "--head", head]) == 1
    assert "record 3 is missing: the chain once reached 3" in capsys.readouterr().out


def test_the_directory_is_that_of_the_settings(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert main(["audit", "verify"]) == 2
    assert "audit.directory" in capsys.readouterr().err
    config = tmp_path / "pando.toml"
    config.write_text(f'[audit]\ndirectory = "{root}"\n')
    assert main(["audit", "verify", "--config", str(config)]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "--since", "yesterday"],
        ["verify", "--head", "3"],
        ["verify", "--head", "3:abc"],
    ],
)
def test_malformed_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", *arguments])
    assert capsys.readouterr().err


def test_a_head_is_about_one_chain(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify", str(root), "--head", "3:0123456789ab"]) == 2
    assert main(["audit", "verify", str(tmp_path / "none")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["audit", "verify", str(tmp_path / "empty")]) == 2
    assert "no files" in capsys.readouterr().err
