"""API keys as stored in a TOML file: each key's SHA-256 with the identity and privileges that it grants."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import tempfile
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from common.errors import ConfigurationError, InvalidRequestError
from common.names import check_name
from common.types import CacheMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
KEY_BYTES = 32
KINDS = MappingProxyType({str: "text", bool: "truth value", int: "whole number", list: "list"})
MAX_ID_CHARACTERS = 64
HEADER = "# API keys of Pando, by their SHA-256; written by `pando keys`. A running gateway reads changes by itself.\n"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key, stored as its hash only. `Caller` explains the privileges that the other fields grant."""

    id: str
    sha256: str
    tenant: str
    user: str | None = None
    vouches_for_users: bool = False
    admin: bool = False
    cache: CacheMode = CacheMode.DEFAULT
    # ISO date, for operators only.
    created: str | None = None
    max_priority: int | None = None
    adapters: tuple[str, ...] | None = None


class KeyRing:
    """All keys of a file, indexed by their hash."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {key.sha256: key for key in keys}

    @property
    def all(self) -> list[ApiKey]:
        """All keys, in the order of their file."""
        return list(self._keys.values())

    def find(self, secret: str) -> ApiKey | None:
        """Return the key whose secret is `secret`.

        The look-up is by hash, so its timing does not reveal how much of a guessed secret was right.
        """
        digest = hash_of(secret)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.sha256, digest) else None


def key_changes(before: KeyRing, after: KeyRing) -> dict[str, list[dict[str, object]]]:
    """Return the keys that were added, removed and changed, as they are or were, without their hashes."""
    old, new = ({key.id: key for key in ring.all} for ring in (before, after))
    return {
        "added": [described(new[name]) for name in sorted(new.keys() - old.keys())],
        "removed": [described(old[name]) for name in sorted(old.keys() - new.keys())],
        "changed": [described(new[name]) for name in sorted(new.keys() & old.keys()) if new[name] != old[name]],
    }


def described(key: ApiKey) -> dict[str, object]:
    """Return the fields of a key that are set, without its hash."""
    values = {field.name: getattr(key, field.name) for field in fields(key) if field.name != "sha256"}
    return {name: value for name, value in values.items() if value not in (None, False, CacheMode.DEFAULT)}


def new_secret(key_id: str) -> str:
    """Return a random key of 256 bits; it begins with its id, so that people can identify it."""
    return f"pando-{key_id}-{secrets.token_urlsafe(KEY_BYTES)}"


def hash_of(secret: str) -> str:
    """Return the SHA-256 of a key as hexadecimal text; 256 random bits need no slower hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def load_keys(path: Path, *, may_be_empty: bool = False) -> list[ApiKey]:
    """Read a keys file: TOML with one `[[keys]]` table per key, with the fields of `ApiKey`.

    Raises:
        ConfigurationError: the file cannot be read, or an entry is malformed or repeated.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"keys file {path}: there is none; `pando keys create` makes it") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"keys file {path}: {error}") from error
    entries = document.get("keys", [] if may_be_empty else None)
    if document.keys() - {"keys"} or not isinstance(entries, list) or not (entries or may_be_empty):
        raise ConfigurationError(f"keys file {path}: expected [[keys]] tables and nothing else")
    keys = [_parse_key(f"keys file {path}: key {number}", entry) for number, entry in enumerate(entries, start=1)]
    for name in ("id", "sha256"):
        if len({getattr(key, name) for key in keys}) != len(keys):
            raise ConfigurationError(f"keys file {path}: two keys have the same {name}")
    return keys


def save_keys(path: Path, keys: Iterable[ApiKey]) -> None:
    """Replace a keys file atomically. A new one can be read by its owner only; owner and mode of an earlier one stay.

    Raises:
        ConfigurationError: the file cannot be written, or it belongs to another user.
    """
    text = HEADER + "".join(map(_dump_key, keys))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            _take_over(Path(scratch), path)
            Path(scratch).replace(path)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(f"keys file {path}: {error}") from error


def _take_over(fresh: Path, old: Path) -> None:
    """Give a file the owner and mode of the one that it replaces, so that the gateway can read it, too."""
    if not old.exists():
        return
    status = old.stat()
    try:
        os.chown(fresh, status.st_uid, status.st_gid)
    except PermissionError:
        raise ConfigurationError(
            f"keys file {old}: it belongs to user {status.st_uid} and group {status.st_gid}; only root, or this user "
            "as a member of this group, can change it"
        ) from None
    fresh.chmod(stat.S_IMODE(status.st_mode))


def _dump_key(key: ApiKey) -> str:
    lines = ["\n[[keys]]"]
    for field in fields(key):
        value = getattr(key, field.name)
        if value == field.default:
            continue
        text = value.value if isinstance(value, CacheMode) else value
        if isinstance(text, tuple):
            text = list(text)
        # A JSON string is a valid TOML basic string, since names have no control characters.
        lines.append(f"{field.name} = {json.dumps(text, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _parse_key(where: str, entry: object) -> ApiKey:
    values = dict(entry) if isinstance(entry, dict) else {}
    if "act_for_users" in values:  # its name in version 0.1
        values.setdefault("vouches_for_users", values.pop("act_for_users"))
    kinds = dict.fromkeys((field.name for field in fields(ApiKey)), str) | {
        "vouches_for_users": bool,
        "admin": bool,
        "max_priority": int,
        "adapters": list,
    }
    if unknown := values.keys() - kinds.keys():
        raise ConfigurationError(f"{where} has unknown fields: {', '.join(sorted(unknown))}")
    if missing := {"id", "sha256", "tenant"} - values.keys():
        raise ConfigurationError(f"{where} lacks {', '.join(sorted(missing))}")
    for name, value in values.items():
        if type(value) is not kinds[name] or value == "":
            raise ConfigurationError(f"{where}: {name} must be a {KINDS[kinds[name]]}")
    if not SHA256_HEX.fullmatch(values["sha256"]):
        raise ConfigurationError(f"{where}: sha256 must be 64 lowercase hexadecimal digits")
    values["adapters"] = _parse_adapters(where, values.get("adapters"))
    try:
        for name in ("id", "tenant", "user"):
            check_name(name, values.get(name, ""))
        values["cache"] = CacheMode(values.get("cache", "default"))
        return ApiKey(**values)
    except InvalidRequestError as error:
        raise ConfigurationError(f"{where}: {error.message}") from error
    except ValueError as error:
        raise ConfigurationError(f"{where}: cache must be default, private or none") from error


def _parse_adapters(where: str, names: Sequence[object] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    wanted = tuple(name for name in names if isinstance(name, str) and name)
    if len(wanted) < len(names):
        raise ConfigurationError(f"{where}: adapters must be a list of names or patterns")
    return wanted
