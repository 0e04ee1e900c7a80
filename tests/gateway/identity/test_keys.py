from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.reloading import Reloading
from common.types import CacheMode
from gateway.identity.keys import ApiKey, KeyRing, hash_of, load_keys, new_secret, save_keys
from gateway.identity.peers import parse_networks

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "pando-k1-0123456789abcdef"
KEY = ApiKey("k1", hash_of(SECRET), "acme")


def write_keys(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_file_is_read(tmp_path: Path) -> None:
    text = f'[[keys]]\nid = "k1"\nsha256 = "{KEY.sha256}"\ntenant = "acme"\n'
    assert load_keys(write_keys(tmp_path / "keys.toml", text)) == [KEY]


def test_saved_keys_are_read_back_and_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.toml"
    full = ApiKey("k2", hash_of("x"), 'a"\\c', "ünïcode", True, True, CacheMode.NONE, "2026-01-01", -3)
    save_keys(path, [KEY, full])
    assert load_keys(path) == [KEY, full]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_replaced_file_stays_readable_for_the_gateways_user(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    save_keys(path, [KEY])
    path.chmod(0o640)
    group = max(os.getgroups(), default=os.getgid())
    owner = 10001 if os.getuid() == 0 else os.getuid()
    os.chown(path, owner, group)
    before = path.stat()
    save_keys(path, [])
    after = path.stat()
    assert after.st_ino != before.st_ino
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (owner, group, 0o640)


def test_a_file_of_another_user_is_not_replaced_by_one_that_this_user_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    save_keys(path, [KEY])

    def chown(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "chown", chown)
    with pytest.raises(ConfigurationError, match=f"belongs to user {os.getuid()} and group"):
        save_keys(path, [])
    assert load_keys(path) == [KEY]
    assert list(tmp_path.iterdir()) == [path]


def test_secrets_differ_and_begin_with_their_id() -> None:
    secrets = {new_secret("k1") for _ in range(100)}
    assert len(secrets) == 100
    assert all(secret.startswith("pando-k1-") and len(secret) >= 9 + 43 for secret in secrets)


def test_only_the_whole_secret_finds_its_key() -> None:
    pipeline = KeyRing([KEY])
    assert pipeline.find(SECRET) is KEY
    assert all(pipeline.find(wrong) is None for wrong in (SECRET[:-1], SECRET + "x", KEY.sha256, "k1", "", "\ud800"))


def test_a_revoked_key_is_unknown_without_restart_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "keys.toml"
    save_keys(path, [KEY])
    pipeline = Reloading(path, lambda path: KeyRing(load_keys(path, may_be_empty=True)), lambda: now)
    write_keys(path, "broken")
    now = 2.0
    assert pipeline.value.find(SECRET) == KEY
    path.unlink()
    now = 4.0
    assert pipeline.value.find(SECRET) == KEY
    save_keys(path, [])
    os.utime(path, (1, 1))
    now = 4.5
    assert pipeline.value.find(SECRET) == KEY
    now = 6.0
    assert pipeline.value.find(SECRET) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = 3",
        "[[keys]]\n",
        "not toml",
        '[[keys]]\nid = "a"\nsha256 = "x"\ntenant = "t"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = ""\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t\\n"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t"\nrole = "x"\n',
        f'other = 1\n[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t"\n' * 2,
    ],
)
def test_malformed_keys_file_stops_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"keys\.toml"):
        load_keys(write_keys(tmp_path / "keys.toml", text))


def test_missing_keys_file_and_bad_network_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml: there is none; `pando keys create` makes it"):
        load_keys(tmp_path / "none.toml")
    with pytest.raises(ConfigurationError):
        parse_networks(["10.0.0.1/8"])
