from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from common.errors import ConfigurationError
from common.settings import StorageSettings
from common.steps import EngineCapacity, RecurrentStates
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import HostConfig, PrefetchPolicy, StorageConfig
from services.scheduler.storage_desk import Keyring, StorageDesk, default_path, resolve_storage
from services.scheduler.wire.state import storage_to_wire

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = EngineCapacity(8, 16, 64, 100, (2,), 1000, "f", "cpu", 1, host_pages=8, has_storage=True)
CHAIN = [b"c" * 16]


def make_cache(host_pages: int = 8) -> RadixCache:
    return RadixCache(PageAllocator(8), 16, host=HostConfig(pages=host_pages))


def settings(path: Path, **values: object) -> StorageSettings:
    return StorageSettings(keyring=path, **values)  # type: ignore[arg-type]


def test_settings_become_rules_in_pages_and_seconds() -> None:
    values = StorageSettings(prefetch="best_effort", min_tokens=40, megabytes_per_s=1.6, write="off")
    assert resolve_storage(values, CAPACITY) == StorageConfig(
        PrefetchPolicy.BEST_EFFORT, 0.5, 3, pages_per_s=100.0, writes=False
    )


def test_where_the_workers_have_a_storage_the_host_tier_gets_it(tmp_path: Path) -> None:
    cache = make_cache()
    StorageDesk(settings(tmp_path / "ring")).attach(cache.host, CAPACITY)
    assert cache.host is not None
    assert cache.host.storage is not None
    assert (tmp_path / "ring").exists()


def test_a_model_with_recurrent_layers_gets_a_storage_too(tmp_path: Path) -> None:
    capacity, cache = replace(CAPACITY, recurrent_states=RecurrentStates(4, 1000, 4)), make_cache()
    StorageDesk(settings(tmp_path / "ring")).attach(cache.host, capacity)
    assert cache.host is not None
    assert cache.host.storage is not None


def test_without_storage_or_host_tier_no_secret_is_made(tmp_path: Path) -> None:
    desk, cache = StorageDesk(settings(tmp_path / "ring")), make_cache()
    desk.attach(cache.host, replace(CAPACITY, has_storage=False))
    desk.attach(make_cache(0).host, CAPACITY)
    desk.advance(1)
    assert cache.host is not None
    assert cache.host.storage is None
    assert list(tmp_path.iterdir()) == []


def test_revocations_by_other_processes_apply_from_the_next_epoch(tmp_path: Path) -> None:
    desk, cache = StorageDesk(settings(tmp_path / "ring")), make_cache()
    desk.attach(cache.host, CAPACITY)
    other = Keyring(tmp_path / "ring")
    assert desk._keyring is not None
    before = desk._keyring.keys((), CHAIN)
    other.revoke(())
    desk.advance(1)
    assert desk._keyring.keys((), CHAIN) == other.keys((), CHAIN) != before


def test_the_secret_can_be_a_setting(tmp_path: Path) -> None:
    desk = StorageDesk(settings(tmp_path / "ring", secret=SecretStr("s" * 32)))
    desk.attach(make_cache().host, CAPACITY)
    assert desk._keyring is not None
    keys = desk._keyring.keys((), CHAIN)
    assert Keyring(tmp_path / "ring", b"s" * 32).keys((), CHAIN) == keys != Keyring(tmp_path / "ring").keys((), CHAIN)


def test_a_keyring_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"storage\.keyring"):
        StorageDesk(settings(tmp_path / "file" / "ring")).attach(make_cache().host, CAPACITY)


def test_a_damaged_keyring_is_left_as_it_is_and_the_storage_out_until_workers_connect_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ring"
    Keyring(path).close()
    intact = path.read_bytes()
    path.write_bytes(b"damaged!" * 1000)
    desk, cache = StorageDesk(settings(path)), make_cache()
    assert desk.attach(cache.host, CAPACITY) is None
    desk.advance(1)
    assert path.read_bytes() == b"damaged!" * 1000
    assert "storage.left_out" in capsys.readouterr().out
    path.write_bytes(intact)
    assert desk.attach(make_cache().host, CAPACITY) is not None


def test_storage_traffic_is_reported(tmp_path: Path) -> None:
    cache = make_cache()
    StorageDesk(settings(tmp_path / "ring", prefetch="best_effort")).attach(cache.host, CAPACITY)
    assert cache.host is not None
    storage = cache.host.storage
    assert storage is not None
    storage.stored_pages, storage.fetched_pages, storage.misses = 1, 2, 3
    storage.reading_pages, storage.writing_pages = 4, 5
    storage.stored_snapshots, storage.fetched_snapshots, storage._reads.unused_pages = 6, 7, 8
    message = storage_to_wire(storage)
    assert message.prefetch == "best_effort"
    assert [value for _, value in message.ListFields()][1:] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_by_default_the_keyring_is_with_the_users_other_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "pando" / "keyring.db"
