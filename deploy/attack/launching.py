"""Servers that the harness starts for itself: one per mode, and others with another threshold of evidence."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.attack.scene import Server
from deploy.bench.deployments import LaunchedDeployment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODES = ("shared", "isolated", "isolated_pinned", "user_aware")
# Small, so that a flood is soon through: 16,384 tokens of KV.
DEVICE_PAGES = 1024
EPOCH_SECONDS = 2.0
OWN_TENANT, RIVAL_TENANT = "default", "rival"


@dataclass(frozen=True, slots=True)
class Launched:
    """A server that runs, and the key of those who attack it from inside its tenant."""

    url: str
    api_key: str
    server: Server


@contextmanager
def launched(
    mode: str, config: str | None, overrides: Sequence[str], principals: int | None = None
) -> Iterator[Launched]:
    """Run a server in `mode`, with `principals` as threshold of evidence if given, as long as the block lasts.

    Raises:
        LaunchError: it does not start.
    """
    own, rival = secrets.token_hex(16), secrets.token_hex(16)
    with TemporaryDirectory(prefix="pando-attack-") as folder:
        keys = Path(folder, "keys.toml")
        keys.write_text(_keys({OWN_TENANT: own, RIVAL_TENANT: rival}), encoding="utf-8")
        defaults = [
            f"scheduler.epoch_seconds={EPOCH_SECONDS}",
            f"scheduler.device_pages={DEVICE_PAGES}",
            # The order that tells most: who has more cached goes first.
            "scheduler.policy=lpm",
        ]
        forced = [f"scheduler.cache={mode}", f"gateway.keys_file={keys}"]
        if principals is not None:
            forced += [f"scheduler.cache_promotion_principals={principals}"]
        with LaunchedDeployment(config, [*overrides, *forced], defaults) as deployment:
            settings = deployment.settings.scheduler
            server = Server(
                mode=mode,
                promotion_principals=settings.cache_promotion_principals,
                epoch_seconds=settings.epoch_seconds,
                capacity_tokens=(settings.device_pages or 0) * settings.page_size or None,
                rival_key=rival,
            )
            yield Launched(deployment.url, own, server)


def _keys(keys: dict[str, str]) -> str:
    entries = (
        f'[[keys]]\nid = "{tenant}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'
        for tenant, key in keys.items()
    )
    return "\n".join(entries)
