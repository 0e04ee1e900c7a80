from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from services.scheduler.cache.accounts import PUBLIC_SCOPE
from services.scheduler.keyring import Keyring

if TYPE_CHECKING:
    from pathlib import Path

CHAIN = [b"c" * 16]
ANN, BOB = ("t", "ann"), ("t", "bob")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keyring.json"


def test_the_secret_is_made_once_and_kept_from_others(path: Path) -> None:
    keys = Keyring(path).keys(ANN, CHAIN)
    assert Keyring(path).keys(ANN, CHAIN) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_two_files_have_two_secrets(tmp_path: Path) -> None:
    assert Keyring(tmp_path / "a").keys(ANN, CHAIN) != Keyring(tmp_path / "b").keys(ANN, CHAIN)


def test_a_given_secret_is_used_and_not_written_down(tmp_path: Path) -> None:
    secret = b"x" * 32
    assert Keyring(tmp_path / "a", secret).keys(ANN, CHAIN) == Keyring(tmp_path / "b", secret).keys(ANN, CHAIN)
    assert secret.hex() not in (tmp_path / "a").read_text()
    Keyring(tmp_path / "a", secret).revoke(ANN)
    assert Keyring(tmp_path / "a", secret).keys(ANN, CHAIN) != Keyring(tmp_path / "b", secret).keys(ANN, CHAIN)


def test_a_given_secret_leaves_the_files_own_alone(path: Path) -> None:
    before = Keyring(path).keys(ANN, CHAIN)
    Keyring(path, b"x" * 32).revoke(BOB)
    assert Keyring(path).keys(ANN, CHAIN) == before


@pytest.mark.parametrize(("revoked", "kept"), [(ANN, BOB), (ANN, PUBLIC_SCOPE), (PUBLIC_SCOPE, ANN)])
def test_what_was_revoked_is_unreachable_for_good_and_the_rest_is_not(
    path: Path, revoked: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    keyring = Keyring(path)
    before = [keyring.keys(scope, CHAIN) for scope in (revoked, kept)]
    keyring.revoke(revoked)
    for ring in (keyring, Keyring(path)):
        assert ring.keys(revoked, CHAIN) != before[0]
        assert ring.keys(kept, CHAIN) == before[1]
        assert ring.keys(revoked, CHAIN) == keyring.keys(revoked, CHAIN)


def test_others_take_a_revocation_over_at_their_next_refresh(path: Path) -> None:
    one, other = Keyring(path), Keyring(path)
    before = one.keys(ANN, CHAIN)
    one.revoke(ANN)
    other.refresh()
    assert other.keys(ANN, CHAIN) == one.keys(ANN, CHAIN) != before


def test_revocations_of_two_processes_add_up(path: Path) -> None:
    one, other = Keyring(path), Keyring(path)
    one.revoke(ANN)
    other.revoke(BOB)
    fresh = Keyring(path)
    assert fresh.keys(ANN, CHAIN) == one.keys(ANN, CHAIN)
    assert fresh.keys(BOB, CHAIN) == other.keys(BOB, CHAIN)


def test_no_name_is_written_down(path: Path) -> None:
    Keyring(path).revoke(("tenant-name", "user-name"))
    assert "name" not in path.read_text()


def test_a_revocation_counts_although_it_cannot_be_written(path: Path) -> None:
    keyring = Keyring(path)
    before = keyring.keys(ANN, CHAIN)
    path.write_text("{")
    keyring.revoke(ANN)
    keyring.refresh()
    assert keyring.keys(ANN, CHAIN) != before


def test_a_secret_that_others_can_read_is_refused(path: Path) -> None:
    Keyring(path)
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        Keyring(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"secret": "00", "generations": {}})])
def test_a_file_that_is_no_keyring_is_refused(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"keyring\.json"):
        Keyring(path)
