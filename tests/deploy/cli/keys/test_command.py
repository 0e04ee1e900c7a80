from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import CacheMode
from deploy.cli import main
from gateway.identity.keys import KeyRing, load_keys

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_key_is_made_shown_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    there = ["--file", str(file)]
    limits = ["--cache", "none", "--max-priority", "7"]
    assert main(["keys", "create", "--tenant", "acme", "--user", "ann", *limits, *there]) == 0
    secret = capsys.readouterr().out.strip()
    assert main(["keys", "create", "--tenant", "acme", "--admin", "--vouches-for-users", *there]) == 0
    capsys.readouterr()
    key = KeyRing(load_keys(file)).find(secret)
    assert key is not None
    assert (key.tenant, key.user, key.cache, key.admin) == ("acme", "ann", CacheMode.NONE, False)
    assert key.max_priority == 7
    assert secret.startswith(f"pando-{key.id}-")
    assert secret not in file.read_text()
    assert main(["keys", "list", *there]) == 0
    shown = capsys.readouterr().out
    assert key.id in shown
    assert key.sha256 not in shown
    assert main(["keys", "revoke", key.id, *there]) == 0
    assert KeyRing(load_keys(file)).find(secret) is None
    assert len(load_keys(file)) == 1


def test_invalid_names_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--file", str(tmp_path / "keys.toml")]
    assert main(["keys", "create", "--tenant", "a\x00b", *there]) == 2
    assert "control characters" in capsys.readouterr().err
    assert main(["keys", "revoke", "nobody", *there]) == 2
