"""Connects the cache to the workers' storage, if they have one: rules from the settings, names from the keyring.

The keyring is a file of random seeds from which names and keys of stored pages are derived; see
`cache/object_keys.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.logs import get_logger
from common.section import read_secret
from services.scheduler.cache.object_keys import KEY_BYTES, ObjectKeys, ScopeKeys, scope_keys, scope_tag
from services.scheduler.cache.tiers.config import PrefetchPolicy, StorageConfig
from services.scheduler.cache.types import PUBLIC_SCOPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from common.settings import StorageSettings
    from common.steps import EngineCapacity
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.types import Scope

_MEGABYTE = 1e6
LEAST_SECRET = 32

# "PKey": distinguishes a keyring from other databases.
_APPLICATION_ID = 0x504B6579
# The leading parts of a scope, which identify the accountable party. Clients choose the rest (a salt) freely, and an
# entry for each salt would let them fill the file.
_ACCOUNTABLE_PARTS = 2
# Maximum number of scopes whose keys are kept in memory, and of seeds that could not be written.
_CACHED_SCOPES = 65_536
# Time that a statement waits for a lock held by another process; it blocks the scheduler's loop.
_LOCK_TIMEOUT_S = 1.0
# Key of the file's own secret in the table of seeds; the tags of scopes are longer.
_OWN_SECRET = b""


class UnreadableKeyringError(ConfigurationError):
    """The keyring's file is damaged, or its disk full."""


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
            ConfigurationError: the keyring cannot be used as configured. A damaged one is no such reason.
        """
        if not capacity.has_storage or host is None:
            return None
        config = resolve_storage(self._settings, capacity)
        if self._keyring is None:
            secret = read_secret("scheduler.storage.secret", self._settings.secret, LEAST_SECRET)
            path = self._settings.keyring or default_path()
            try:
                self._keyring = Keyring(path, None if secret is None else secret.encode())
            except UnreadableKeyringError as error:
                # Storage only saves work. The next workers that connect try again.
                self._log.error("storage.left_out", reason=str(error))
                return None
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


@dataclass(slots=True)
class _File:
    """An open keyring."""

    database: sqlite3.Connection
    # The secret shared by the deployments that use the file.
    secret: bytes = field(repr=False)
    # `identity` changes when the file is deleted or replaced, `version` when another process writes to it.
    identity: tuple[int, int] | None
    version: int


class Keyring:
    """Owns the seeds; several schedulers that share a storage share the file.

    There is one seed per subject and tenant and one for the public. `revoke` overwrites it, so that pages stored under
    it can be neither named nor decrypted any more, wherever copies of them exist. Other processes apply the revocation
    at their next `refresh`. If the file cannot be written, the revocation holds in this process, new seeds are kept in
    its memory, and an error is logged; `refresh` tries again.
    """

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        """Open `path`; if there is no such file, create one that only this user can read.

        Args:
            path: An SQLite database.
            secret: At least 32 bytes; None: the file's own secret, which is created with the file.

        Raises:
            UnreadableKeyringError: the file is damaged, or the disk full.
            ConfigurationError: it is another database, readable by others, or cannot be opened or created.
        """
        self._path = path
        self._given = secret
        self._log = get_logger("keyring")
        self._cached: dict[Scope, ScopeKeys] = {}
        # Seeds to be written to the file, by tag of the scope: those that replace revoked ones, and those of new
        # subjects, unless the file has theirs by then.
        self._revoking: dict[bytes, bytes] = {}
        self._new: dict[bytes, bytes] = {}
        self._is_together = False
        # Whether reads and writes have succeeded since `together` began.
        self._is_readable = self._is_writable = True
        try:
            self._file = _open(path, secret)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"scheduler.storage.keyring {path}: {error}") from error
        except sqlite3.Error as error:
            raise UnreadableKeyringError(f"scheduler.storage.keyring {path}: {error}") from error

    def keys(self, scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
        """Return the current names and key for writing and looking up pages of `scope`."""
        keys = self._cached.get(scope)
        if keys is None:
            with contextlib.nullcontext() if self._is_together else self.together():
                keys = scope_keys(self._file.secret, self._seed(self._tag(scope)), scope)
                if len(self._cached) >= _CACHED_SCOPES:
                    self._cached.clear()
                # Before the end of the context, which drops the keys of seeds that the file has otherwise.
                self._cached[scope] = keys
        return keys.of_pages(hashes)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Write the seeds of all subjects that are new within the context at its end, as each write waits for the disk.

        After a failed write, nothing is written until the context ends, and after a failed read, nothing is read, so
        that not each subject waits for a lock. Seeds that were not written stay in memory, and are written at the end
        of the next context with new subjects, or by `refresh`; if the file has another seed of the subject by then,
        that one replaces them. Until they are written, pages stored under them cannot be found by other processes.
        """
        self._is_together = self._is_readable = self._is_writable = True
        try:
            yield
        finally:
            self._is_together = False
            if self._file.database.in_transaction:
                self._write()

    def revoke(self, scope: Scope = PUBLIC_SCOPE) -> None:
        """Replace the seed of `scope`, which also revokes all other scopes of the same subject."""
        self._cached.clear()
        tag = self._tag(scope)
        self._new.pop(tag, None)
        self._revoking[tag] = secrets.token_bytes(KEY_BYTES)
        self._write()

    def refresh(self) -> None:
        """Apply other processes' revocations, and reopen the file if it was replaced; write seeds that are not in it.

        If it cannot be read, nothing is written, as that would wait for the same lock again.
        """
        try:
            if _identity(self._path) != self._file.identity:
                self._log.warning("keyring.replaced", path=str(self._path))
                self._cached.clear()
                # They belonged to a file that is gone.
                self._revoking.clear()
                self._new.clear()
                self._file.database.close()
                self._file = _open(self._path, self._given)
            elif (version := _data_version(self._file.database)) != self._file.version:
                self._cached.clear()
                self._file.version = version
        except (OSError, sqlite3.Error, ValueError, ConfigurationError):
            self._log.exception("keyring.unreadable", path=str(self._path))
        else:
            if self._revoking or self._new:
                # The file may have seeds that could not be read before.
                self._cached.clear()
                self._write()

    def close(self) -> None:
        self._file.database.close()

    def _tag(self, scope: Scope) -> bytes:
        return scope_tag(self._file.secret, scope[:_ACCOUNTABLE_PARTS])

    def _seed(self, tag: bytes) -> bytes:
        """Return the seed of a tag, within `together`."""
        if tag in self._revoking:
            return self._revoking[tag]
        found = self._find(tag)
        if found is not None:
            return found
        if tag not in self._new and len(self._new) >= _CACHED_SCOPES:
            del self._new[next(iter(self._new))]
        return self._new.setdefault(tag, secrets.token_bytes(KEY_BYTES))

    def _find(self, tag: bytes) -> bytes | None:
        """Return a seed from the file; if it has none, begin a transaction, so that no other process writes one."""
        database, found = self._file.database, None
        try:
            if self._is_readable:
                found = _seed_in(database, tag)
        except sqlite3.Error:
            self._is_readable = self._is_writable = False
            self._log.exception("keyring.unusable", path=str(self._path))
        try:
            if found is None and self._is_writable and not database.in_transaction:
                database.execute("BEGIN IMMEDIATE")
                found = _seed_in(database, tag)
        except sqlite3.Error:
            self._is_writable = False
            self._log.exception("keyring.unusable", path=str(self._path))
        return found

    def _write(self) -> None:
        """Write all seeds that are not in the file, in the open transaction if there is one."""
        try:
            with _transaction(self._file.database) as database:
                database.executemany("INSERT OR REPLACE INTO seeds VALUES (?, ?)", list(self._revoking.items()))
                # Of several processes' seeds for one subject, the first is kept.
                added = database.executemany("INSERT OR IGNORE INTO seeds VALUES (?, ?)", list(self._new.items()))
        except sqlite3.Error:
            event = "keyring.revocation_not_written" if self._revoking else "keyring.unusable"
            self._log.exception(event, path=str(self._path))
        else:
            if added.rowcount < len(self._new):
                self._cached.clear()
            self._revoking.clear()
            self._new.clear()


def _open(path: Path, secret: bytes | None) -> _File:
    database = _open_database(path)
    try:
        own_or_given = secret or _own_secret(database)
        return _File(database, own_or_given, _identity(path), _data_version(database))
    except BaseException:
        database.close()
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _data_version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA data_version").fetchone()[0])


def _open_database(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite would create it readable by others.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if path.stat().st_mode & 0o077:
        raise ConfigurationError(f"others can read {path}, which holds keys: chmod 600 it")
    database = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
    try:
        # Revoked seeds must not remain readable in free parts of the file or in its journal.
        for pragma in ("secure_delete = ON", "journal_mode = TRUNCATE", "synchronous = FULL"):
            database.execute(f"PRAGMA {pragma}")
        # Not in a transaction: on a disk that is full or read-only, its seeds can still be read.
        if not _is_keyring(database):
            with _transaction(database):
                _check_or_make_tables(database)
    except BaseException:
        database.close()
        raise
    return database


def _is_keyring(database: sqlite3.Connection) -> bool:
    (application,) = database.execute("PRAGMA application_id").fetchone()
    return bool(application == _APPLICATION_ID)


def _check_or_make_tables(database: sqlite3.Connection) -> None:
    if _is_keyring(database):
        return
    if database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        raise ValueError("not a keyring")
    database.execute("CREATE TABLE seeds (scope BLOB PRIMARY KEY, seed BLOB NOT NULL) WITHOUT ROWID")
    database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")


def _own_secret(database: sqlite3.Connection) -> bytes:
    found = _seed_in(database, _OWN_SECRET)
    if found is None:
        # If another process inserts one at the same time, the first of the two is kept.
        row = (_OWN_SECRET, secrets.token_bytes(KEY_BYTES))
        database.execute("INSERT OR IGNORE INTO seeds VALUES (?, ?)", row)
        found = _seed_in(database, _OWN_SECRET)
    assert found is not None, "inserted above"
    return found


def _seed_in(database: sqlite3.Connection, tag: bytes) -> bytes | None:
    found = database.execute("SELECT seed FROM seeds WHERE scope = ?", (tag,)).fetchone()
    return None if found is None else bytes(found[0])


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commit all writes, or none if an exception is raised, also by the commit; begin unless that was done before."""
    try:
        if not database.in_transaction:
            database.execute("BEGIN IMMEDIATE")
        yield database
        database.execute("COMMIT")
    except BaseException:
        # Some errors have rolled it back already.
        if database.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
        raise
