"""The storage tier's part of the scheduler's section; the storage's location is in the workers' section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from common.settings.cache import CacheSettings


class StorageSettings(CacheSettings):
    """The storage tier: it requires a host tier, and `worker.storage` on every rank."""

    storage_prefetch: Literal["off", "best_effort", "timeout", "wait_complete"] = "timeout"
    """Loading of a new prompt's pages from storage. off: they are not loaded. best_effort: they are loaded, but the
    request does not wait. timeout: the request waits up to storage_wait_ms. wait_complete: it waits until they are
    loaded; the workers' storage_timeout_s bounds the time."""
    storage_wait_ms: float = Field(default=500.0, ge=0)
    """With storage_prefetch timeout: longest time in milliseconds that a request waits for its pages."""
    storage_min_tokens: int = Field(default=64, ge=1)
    """Smallest number of missing tokens for which storage is read; fewer are computed sooner."""
    storage_pages_in_flight: int = Field(default=1024, ge=1)
    """Pages that may be in transfer between host and storage at the same time."""
    storage_megabytes_per_s: float = Field(default=0.0, ge=0)
    """Limit on the read rate from storage, per rank, in MB/s; 0: no limit."""
    storage_write: Literal["backed_up", "off"] = "backed_up"
    """backed_up: pages that are copied to the host are written to storage as well. off: nothing is written."""
    storage_keyring: Path | None = None
    """SQLite file with the random seeds from which names and keys of stored pages are derived; created with mode 0600
    if it does not exist. Schedulers that share a storage must share this file. Without it, no stored page can be read;
    a backup of it makes the pages of forgotten users readable again. Default: pando/keyring.db in $XDG_STATE_HOME or
    ~/.local/state."""
    storage_secret: SecretStr | None = Field(default=None, min_length=32)
    """If set, this secret is required in addition to the keyring to read stored pages; at least 32 characters that
    cannot be guessed."""
