"""Connects the cache to the workers' storage, if they have one: rules from the settings, names from the keyring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from common.logs import get_logger
from common.secrets import read_secret
from services.scheduler.cache.tiers.storage_config import PrefetchPolicy, StorageConfig
from services.scheduler.keyring import Keyring

if TYPE_CHECKING:
    from common.settings import StorageSettings
    from common.steps import EngineCapacity
    from services.scheduler.cache.tiers.host_tier import HostTier

_MEGABYTE = 1e6
LEAST_SECRET = 32


class StorageDesk:
    """Owns the keyring, which is opened, and created if necessary, only if there is a storage."""

    def __init__(self, settings: StorageSettings) -> None:
        self._settings = settings
        self._keyring: Keyring | None = None
        self._epoch = 0
        self._log = get_logger("storage")

    def attach(self, host: HostTier | None, capacity: EngineCapacity) -> StorageConfig | None:
        """Attach the workers' storage to a new cache's host tier, if there are both; return its rules.

        Raises:
            ConfigurationError: the keyring cannot be used.
        """
        if not capacity.has_storage or host is None:
            return None
        config = resolve_storage(self._settings, capacity)
        if self._keyring is None:
            secret = read_secret("scheduler.storage.secret", self._settings.secret, LEAST_SECRET)
            path = self._settings.keyring or default_path()
            self._keyring = Keyring(path, None if secret is None else secret.encode())
        host.add_storage(config, self._keyring)
        self._log.info("storage.attached", prefetch=config.policy.value, writes=config.writes)
        return config

    def advance(self, epoch: int) -> None:
        """In each new epoch, apply revocations of other schedulers with the same keyring."""
        if self._keyring is not None and epoch != self._epoch:
            self._epoch = epoch
            self._keyring.refresh()


def resolve_storage(settings: StorageSettings, capacity: EngineCapacity) -> StorageConfig:
    """Convert the settings for workers of this capacity."""
    page_bytes = capacity.kv_bytes_per_token * capacity.page_size
    return StorageConfig(
        policy=PrefetchPolicy(settings.prefetch),
        min_pages=max(1, -(-settings.min_tokens // capacity.page_size)),
        pages_per_s=settings.megabytes_per_s * _MEGABYTE / page_bytes,
        writes=settings.write == "backed_up",
    )


def default_path() -> Path:
    """Return the keyring's default location."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "pando" / "keyring.db"
