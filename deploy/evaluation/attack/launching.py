"""Servers that the harness starts for itself: one per mode, and others with another threshold or over one storage."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.evaluation.attack.scene import Server, VictimKeys
from deploy.evaluation.bench.deployments import LaunchedDeployment
from gateway.identity.keys import ApiKey, hash_of, save_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = ("shared", "isolated", "isolated_pinned", "user_aware")
# Small, so that a flood is soon through: 16,384 tokens of KV.
DEVICE_PAGES = 1024
EPOCH_SECONDS = 2.0
# The order that tells most: who has more cached goes first.
DEFAULTS = (
    f"scheduler.cache.epoch_seconds={EPOCH_SECONDS}",
    f"scheduler.device_pages={DEVICE_PAGES}",
    "scheduler.queue.policy=lpm",
)
OWN_TENANT, RIVAL_TENANT, THIRD_TENANT, ISOLATED_TENANT = "default", "rival", "third", "isolated"
LIMITS = f"""
[tenants.{ISOLATED_TENANT}]
sharing = "none"
"""
KEYS_FILE, LIMITS_FILE = "keys.toml", "limits.toml"
# Few rows, small steps and an engine that takes this long for each, so that a queue forms whose order can be seen.
STEP_MS = 20.0
FAIR_ROWS = 4
FAIR = (
    "scheduler.queue.policy=fair",
    f"scheduler.max_rows={FAIR_ROWS}",
    "scheduler.max_step_tokens=256",
)
KEYLESS = ("gateway.anonymous=auto",)
# So that no text of many is evicted before it is looked at, which could hide that it is shared.
ROOMY = (f"scheduler.device_pages={8 * DEVICE_PAGES}",)
# A threshold of evidence, a quota and a share are the same with and without a model.
NO_MODEL = ("model.load_format=fake",)


def _key() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class LaunchedKeys:
    """The keys of a launched server. `app` vouches for its users, who are the victims and their neighbours."""

    app: str = field(default_factory=_key)
    plain: str = field(default_factory=_key)
    personal: str = field(default_factory=_key)
    rival: str = field(default_factory=_key)
    rival_app: str = field(default_factory=_key)
    third: str = field(default_factory=_key)
    isolated: str = field(default_factory=_key)
    admin: str = field(default_factory=_key)

    def save(self, path: Path) -> None:
        """Write the keys file of the gateway."""
        keys = [
            ApiKey("app", hash_of(self.app), OWN_TENANT, vouches_for_users=True),
            ApiKey("plain", hash_of(self.plain), OWN_TENANT),
            ApiKey("personal", hash_of(self.personal), OWN_TENANT, user="somebody"),
            ApiKey("rival", hash_of(self.rival), RIVAL_TENANT),
            ApiKey("rival-app", hash_of(self.rival_app), RIVAL_TENANT, vouches_for_users=True),
            ApiKey("third", hash_of(self.third), THIRD_TENANT),
            ApiKey("isolated", hash_of(self.isolated), ISOLATED_TENANT, vouches_for_users=True),
            ApiKey("admin", hash_of(self.admin), OWN_TENANT, admin=True),
        ]
        save_keys(path, keys)

    @property
    def credentials(self) -> VictimKeys:
        """The keys as attackers have them."""
        return VictimKeys(self.plain, self.personal, self.rival, self.rival_app, self.third, self.isolated, self.admin)


@dataclass(frozen=True, slots=True)
class Launch:
    """A deployment to start: a mode, the user's own settings, and the settings that an oracle needs.

    `settings` go before the user's; `promotion_subjects` is the threshold of evidence, `storage` the storage's
    directory. The keys are equal for servers that are made from one `Launch`; `has_keys` says whether requests need
    one; `fake_step_ms` is the duration of a pass without a model.
    """

    mode: str
    config: str | None = None
    overrides: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    promotion_subjects: int | None = None
    storage: Path | None = None
    has_keys: bool = True
    fake_step_ms: float | None = None
    keys: LaunchedKeys = field(default_factory=LaunchedKeys)
    storage_secret: str = field(default_factory=_key)

    def all_settings(self, folder: Path) -> list[str]:
        """Return the settings that go before all others; keys and limits are files in `folder`."""
        settings = [*self.overrides, *self.settings, f"scheduler.cache.mode={self.mode}"]
        if self.has_keys:
            settings += [f"gateway.keys_file={folder / KEYS_FILE}", f"limits.file={folder / LIMITS_FILE}"]
        if self.promotion_subjects is not None:
            settings.append(f"scheduler.cache.promotion_subjects={self.promotion_subjects}")
        if self.storage is not None:
            settings += [
                f"worker.storage.location={self.storage}",
                f"scheduler.host_tier.pages={DEVICE_PAGES}",
                f"scheduler.storage.keyring={self.storage / 'keyring.db'}",
                f"scheduler.storage.secret={self.storage_secret}",
                "scheduler.storage.prefetch=wait_complete",
                "scheduler.storage.min_tokens=1",
            ]
        return settings


@dataclass(frozen=True, slots=True)
class Launched:
    """A server that runs, and the key under which victims are named; None where there are no keys."""

    url: str
    api_key: str | None
    server: Server


@contextmanager
def launched(launch: Launch) -> Iterator[Launched]:
    """Run a server as long as the block lasts.

    Raises:
        LaunchError: it does not start.
    """
    with TemporaryDirectory(prefix="pando-attack-") as folder:
        launch.keys.save(Path(folder, KEYS_FILE))
        Path(folder, LIMITS_FILE).write_text(LIMITS, encoding="utf-8")
        with LaunchedDeployment(
            launch.config, launch.all_settings(Path(folder)), DEFAULTS, fake_step_ms=launch.fake_step_ms
        ) as deployment:
            settings = deployment.settings.scheduler
            server = Server(
                mode=launch.mode,
                model=deployment.model,
                promotion_subjects=settings.cache.promotion_subjects,
                epoch_seconds=settings.cache.epoch_seconds,
                capacity_tokens=(settings.device_pages or 0) * settings.page_size or None,
                credentials=launch.keys.credentials if launch.has_keys else VictimKeys(),
                storage=launch.storage,
                policy=settings.queue.policy,
                rows=settings.max_rows,
                has_keys=launch.has_keys,
            )
            yield Launched(deployment.url, launch.keys.app if launch.has_keys else None, server)
