"""The part of the scheduler's section that is about the storage tier; where it is, is in the workers' section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from common.settings.cache import CacheSettings


class StorageSettings(CacheSettings):
    """What goes to storage and comes back. It needs a host tier, and `worker.storage` on every rank."""

    storage_prefetch: Literal["off", "best_effort", "timeout", "wait_complete"] = "timeout"
    """When a prompt arrives whose pages may be in storage: leave them there; load them, but never wait; wait for them
    up to storage_wait_ms; or wait as long as it takes, which the workers' storage_timeout_s bounds."""
    storage_wait_ms: float = Field(default=500.0, ge=0)
    """With storage_prefetch timeout, a request waits for its pages at most so long."""
    storage_min_tokens: int = Field(default=64, ge=1)
    """Fewer missing tokens than these are computed sooner than looked up."""
    storage_pages_in_flight: int = Field(default=1024, ge=1)
    """Pages that may be on their way between host and storage at the same time."""
    storage_megabytes_per_s: float = Field(default=0.0, ge=0)
    """Reading from storage goes on at most at this rate per rank; 0: as fast as it can."""
    storage_write: Literal["backed_up", "off"] = "backed_up"
    """What is copied to the host goes to storage as well, or nothing does."""
    storage_keyring: Path | None = None
    """SQLite file of the random seeds that names and keys of stored pages derive from; made with mode 0600 when absent.
    Schedulers that share a storage share it. A backup of it makes pages of forgotten users readable again, and without
    it no page is. By default pando/keyring.db in $XDG_STATE_HOME or ~/.local/state."""
    storage_secret: SecretStr | None = Field(default=None, min_length=32)
    """Is needed beside the file to read stored pages, if it is set: at least 32 characters that cannot be guessed."""
