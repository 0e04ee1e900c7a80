"""Servers that the harness starts for itself: one per mode, and others with another threshold or over one storage."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.attack.scene import Server
from deploy.bench.deployments import LaunchedDeployment

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = ("shared", "isolated", "isolated_pinned", "user_aware")
# Small, so that a flood is soon through: 16,384 tokens of KV.
DEVICE_PAGES = 1024
EPOCH_SECONDS = 2.0
# The order that tells most: who has more cached goes first.
DEFAULTS = (
    f"scheduler.epoch_seconds={EPOCH_SECONDS}",
    f"scheduler.device_pages={DEVICE_PAGES}",
    "scheduler.policy=lpm",
)
OWN_TENANT, RIVAL_TENANT = "default", "rival"


def _key() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started: a mode, the user's own settings, `principals` as threshold of evidence, and `storage`.

    The keys are those of the attackers' tenant and of another one; equal for servers that are made from one `Launch`.
    """

    mode: str
    config: str | None = None
    overrides: tuple[str, ...] = ()
    principals: int | None = None
    storage: Path | None = None
    own_key: str = field(default_factory=_key)
    rival_key: str = field(default_factory=_key)
    storage_secret: str = field(default_factory=_key)

    def settings(self, keys_file: Path) -> list[str]:
        """Return the settings that go before all others."""
        settings = [*self.overrides, f"scheduler.cache={self.mode}", f"gateway.keys_file={keys_file}"]
        if self.principals is not None:
            settings.append(f"scheduler.cache_promotion_subjects={self.principals}")
        if self.storage is not None:
            settings += [
                f"worker.storage={self.storage}",
                f"scheduler.cache_host_pages={DEVICE_PAGES}",
                f"scheduler.storage_keyring={self.storage / 'keyring.db'}",
                f"scheduler.storage_secret={self.storage_secret}",
                "scheduler.storage_prefetch=wait_complete",
                "scheduler.storage_min_tokens=1",
            ]
        return settings


@dataclass(frozen=True, slots=True)
class Launched:
    """A server that runs, and the key of those who attack it from inside its tenant."""

    url: str
    api_key: str
    server: Server


@contextmanager
def launched(launch: Launch) -> Iterator[Launched]:
    """Run a server as long as the block lasts.

    Raises:
        LaunchError: it does not start.
    """
    with TemporaryDirectory(prefix="pando-attack-") as folder:
        keys_file = Path(folder, "keys.toml")
        keys_file.write_text(_keys_toml({OWN_TENANT: launch.own_key, RIVAL_TENANT: launch.rival_key}), encoding="utf-8")
        with LaunchedDeployment(launch.config, launch.settings(keys_file), DEFAULTS) as deployment:
            settings = deployment.settings.scheduler
            server = Server(
                mode=launch.mode,
                promotion_subjects=settings.cache_promotion_subjects,
                epoch_seconds=settings.epoch_seconds,
                capacity_tokens=(settings.device_pages or 0) * settings.page_size or None,
                rival_key=launch.rival_key,
            )
            yield Launched(deployment.url, launch.own_key, server)


def _keys_toml(keys: dict[str, str]) -> str:
    entries = (
        f'[[keys]]\nid = "{tenant}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'
        for tenant, key in keys.items()
    )
    return "\n".join(entries)
