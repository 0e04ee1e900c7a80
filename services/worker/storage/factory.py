"""Makes the storage that a rank's settings name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.section import read_secret
from services.worker.storage.interface import StorageError

if TYPE_CHECKING:
    from common.settings import WorkerStorageSettings
    from services.worker.storage.interface import Storage

# Concurrent calls to the storage; at most half of them write.
STORAGE_THREADS = 4
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def make_storage(settings: WorkerStorageSettings) -> Storage | None:
    """Return the back end, None where no storage is configured.

    Raises:
        ConfigurationError: the place cannot be used as configured; a server that is down is no such reason.
    """
    place = read_secret("worker.storage.location", settings.location)
    if place is None:
        return None
    try:
        if place.startswith(_REDIS_SCHEMES):
            # Only who uses it needs the package.
            from services.worker.storage.redis_server import RedisStorage

            return RedisStorage(place, settings.timeout_s, STORAGE_THREADS)
        if "://" in place:
            raise StorageError(f"a directory or one of {', '.join(_REDIS_SCHEMES)}…")
        from services.worker.storage.files import FileStorage

        return FileStorage(Path(place), int(settings.gigabytes * 1024**3))
    except StorageError as error:
        raise ConfigurationError(f"worker.storage.location: {error}") from error
