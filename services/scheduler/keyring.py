"""The file behind storage keys: the secret, and which generation of whose pages can be reached."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.logs import get_logger
from services.scheduler.cache.accounts import PUBLIC_SCOPE
from services.scheduler.cache.object_keys import object_keys, scope_tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from services.scheduler.cache.accounts import Scope

_SECRET_BYTES = 32


class Keyring:
    """Owns the secret and the generations; several schedulers that share a storage share the file.

    What one of them revokes, it cannot reach from then on, and the others not after their next `refresh`. If the file
    cannot be written, the revocation holds only as long as this process lives, and an error is logged.
    """

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        """Read `path`; where there is no such file, make one that only this user can read.

        Args:
            path: Where generations are kept, and the secret unless it is given.
            secret: At least 32 bytes; absent: the file's, made up when the file is.

        Raises:
            ConfigurationError: it can neither be read nor made, holds something else, or others can read it.
        """
        self._path = path
        self._log = get_logger("keyring")
        self._given = secret
        self._secret = secret or b""
        # The file's own secret, be it in use or not.
        self._kept: str | None = None
        self._generations: dict[str, int] = {}
        try:
            with self._locked():
                if not path.exists():
                    self._kept = None if secret else secrets.token_bytes(_SECRET_BYTES).hex()
                    self._write()
                if path.stat().st_mode & 0o077:
                    raise ConfigurationError(f"others can read {path}, which holds a secret: chmod 600 it")
                self._read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"scheduler.storage_keyring {path}: {error}") from error

    def keys(self, scope: Scope, hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Return the storage keys of pages of `scope`, as they are to be written and looked up now."""
        return object_keys(self._secret, scope, self._generations.get(self._tag(scope), 0), hashes)

    def revoke(self, scope: Scope = PUBLIC_SCOPE) -> None:
        """Make everything that was stored for `scope` unreachable."""
        tag = self._tag(scope)
        self._generations[tag] = self._generations.get(tag, 0) + 1
        try:
            with self._locked():
                self._read()
                self._write()
        except (OSError, ValueError, KeyError, TypeError):
            self._log.exception("keyring.revocation_not_written", path=str(self._path))

    def refresh(self) -> None:
        """Take over what others have revoked."""
        try:
            self._read()
        except (OSError, ValueError, KeyError, TypeError):
            self._log.exception("keyring.unreadable", path=str(self._path))

    def _tag(self, scope: Scope) -> str:
        # All views of a subject have one generation, so that forgetting it needs no list of its salts.
        return scope_tag(self._secret, scope[:2]) if scope else "public"

    def _read(self) -> None:
        """Take the file's generations over where they are later than what is known."""
        content = json.loads(self._path.read_text(encoding="ascii"))
        if not isinstance(content, dict):
            raise TypeError("not a keyring")
        self._kept = content.get("secret")
        secret = self._given or bytes.fromhex(content["secret"])
        if len(secret) < _SECRET_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes, at least {_SECRET_BYTES} are needed")
        if self._secret and secret != self._secret:
            raise ValueError("the secret has changed; the new one counts from the next start on")
        self._secret = secret
        for tag, generation in content["generations"].items():
            self._generations[tag] = max(self._generations.get(tag, 0), int(generation))

    def _write(self) -> None:
        kept = {} if self._kept is None else {"secret": self._kept}
        content = {**kept, "generations": self._generations}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from changing the file meanwhile."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self._path.with_name(f".{self._path.name}.lock")
        with open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
