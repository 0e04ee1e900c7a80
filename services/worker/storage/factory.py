"""Makes the storage that a rank's settings name."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.section import read_secret
from services.worker.storage.interface import StorageError

if TYPE_CHECKING:
    from common.settings import WorkerStorageSettings
    from services.worker.storage.interface import Storage, StorageFactory

# Concurrent calls to the storage; at most half of them write.
STORAGE_THREADS = 4
REDIS_SCHEMES = (
    "redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
)  # fmt: skip
# Back ends of other packages, by the schemes of their URLs.
ENTRY_POINTS = "pando.storage"


def make_storage(settings: WorkerStorageSettings) -> Storage | None:
    """Return the back end, None where no storage is configured.

    Raises:
        ConfigurationError: the place cannot be used as configured; a server that is down is no such reason.
    """
    place = read_secret("worker.storage.location", settings.location)
    if place is None:
        return None
    scheme, separator, _ = place.partition("://")
    try:
        if scheme in REDIS_SCHEMES and separator:
            # Only who uses it needs the package.
            from services.worker.storage.redis_server import RedisStorage

            return RedisStorage(place, settings.timeout_s, STORAGE_THREADS)
        if separator:
            return _find_factory(scheme)(place, settings.timeout_s, STORAGE_THREADS)
        from services.worker.storage.files import FileStorage

        return FileStorage(Path(place), int(settings.gigabytes * 1024**3))
    except StorageError as error:
        raise ConfigurationError(f"worker.storage.location: {error}") from error


def _find_factory(scheme: str) -> StorageFactory:
    """Return the back end that an installed package has for a scheme; raises StorageError if there is none."""
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if scheme not in installed:
        known = ", ".join(f"{name}://…" for name in (*REDIS_SCHEMES, *sorted(installed)))
        raise StorageError(f"should be a directory or a URL: {known}")
    try:
        factory: StorageFactory = installed[scheme].load()
    except (ImportError, AttributeError) as error:
        raise StorageError(f"the back end for {scheme}:// cannot be loaded: {error}") from error
    return factory
