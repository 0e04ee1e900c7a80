"""Who is asking: API keys name a tenant, the request names a user in it, and nobody names another tenant."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from common.errors import ConfigurationError, InvalidRequestError, UnauthenticatedError
from common.names import check_name
from common.types import CacheMode, Principal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from starlette.datastructures import Headers

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

CACHE_MODES = tuple(mode.value for mode in CacheMode)
SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is stored: only its hash is known here."""

    id: str
    sha256: str
    tenant: str
    # What the cache may do with requests under this key at most.
    cache_mode: CacheMode = CacheMode.DEFAULT


@dataclass(frozen=True, slots=True)
class Caller:
    """What the connection and its headers say; `user` is set only if a trusted proxy named one."""

    tenant: str
    user: str | None = None
    key_id: str | None = None
    cache_mode: CacheMode = CacheMode.DEFAULT


@dataclass(frozen=True, slots=True)
class TrustedProxy:
    """Direct peers in `networks` may name tenant and user in these headers."""

    networks: tuple[Network, ...]
    tenant_header: str
    user_header: str

    def trusts(self, peer: str | None) -> bool:
        """Whether the TCP peer `peer` is a configured proxy."""
        try:
            address = ipaddress.ip_address(peer or "")
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self.networks)


class Identity:
    """Decides the principal of each request. Without keys every caller belongs to `default_tenant`."""

    def __init__(self, keys: Iterable[ApiKey] | None, proxy: TrustedProxy, default_tenant: str) -> None:
        """Know the keys; None means that none are asked for."""
        self._keys = None if keys is None else {key.sha256: key for key in keys}
        self._proxy = proxy
        self._default_tenant = default_tenant

    def caller(self, headers: Headers, peer: str | None) -> Caller:
        """Return whose connection this is; `peer` is the address of the direct TCP peer.

        Raises:
            UnauthenticatedError: a key is asked for, and there is none or an unknown one.
            InvalidRequestError: the proxy's headers are malformed.
        """
        tenant, user = None, None
        if self._proxy.trusts(peer):
            tenant = _single_header(headers, self._proxy.tenant_header)
            user = _single_header(headers, self._proxy.user_header)
        if tenant is not None:
            return Caller(tenant, user)
        if self._keys is None:
            return Caller(self._default_tenant, user)
        key = self._key(headers)
        return Caller(key.tenant, user, key.id, key.cache_mode)

    def _key(self, headers: Headers) -> ApiKey:
        scheme, _, value = headers.get("authorization", "").strip().partition(" ")
        if scheme.lower() != "bearer" or not value.strip():
            raise UnauthenticatedError(
                "You didn't provide an API key. Send it in the Authorization header: Authorization: Bearer YOUR_KEY."
            )
        # The look-up is by hash, so its timing tells nothing about how much of a guessed key was right.
        digest = hashlib.sha256(value.strip().encode("utf-8", "surrogateescape")).hexdigest()
        key = (self._keys or {}).get(digest)
        if key is None or not hmac.compare_digest(key.sha256, digest):
            raise UnauthenticatedError("Incorrect API key provided.")
        return key


def principal_of(caller: Caller, named: Sequence[tuple[str, str | None]]) -> Principal:
    """Return the principal of a request whose fields `named` (field, value) may name a user; the first one set wins.

    What a trusted proxy said wins over the fields. Nobody named: a fresh principal, equal to no other.

    Raises:
        InvalidRequestError: the name is too long or has control characters.
    """
    if caller.user is not None:
        return Principal(caller.tenant, caller.user)
    for field, value in named:
        if value:
            return Principal(caller.tenant, check_name(field, value))
    return Principal(caller.tenant, f"anonymous-{secrets.token_hex(16)}")


def load_keys(path: Path) -> list[ApiKey]:
    """Read a keys file: TOML with one `[[keys]]` table per key: `id`, `sha256` (hex), `tenant`, and perhaps `cache`.

    Raises:
        ConfigurationError: the file cannot be read, or an entry is malformed or repeated.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"keys file {path}: {error}") from error
    unknown = document.keys() - {"keys"}
    entries = document.get("keys")
    if unknown or not isinstance(entries, list) or not entries:
        raise ConfigurationError(f"keys file {path}: expected [[keys]] tables and nothing else")
    keys = [_parse_key(path, number, entry) for number, entry in enumerate(entries, start=1)]
    for name in ("id", "sha256"):
        if len({getattr(key, name) for key in keys}) != len(keys):
            raise ConfigurationError(f"keys file {path}: two keys have the same {name}")
    return keys


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return CIDR texts as networks.

    Raises:
        ConfigurationError: one is malformed.
    """
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigurationError(f"gateway.trusted_proxies: {error}") from error


def _parse_key(path: Path, number: int, entry: object) -> ApiKey:
    fields = {"cache": "default", **entry} if isinstance(entry, dict) else {}
    texts = all(isinstance(value, str) and value for value in fields.values())
    if fields.keys() != {"id", "sha256", "tenant", "cache"} or not texts:
        raise ConfigurationError(
            f"keys file {path}: key {number} must have exactly the texts id, sha256 and tenant, and may have cache"
        )
    if fields["cache"] not in CACHE_MODES:
        raise ConfigurationError(f"keys file {path}: cache of key {number} must be one of {', '.join(CACHE_MODES)}")
    if not SHA256_HEX.fullmatch(fields["sha256"]):
        raise ConfigurationError(f"keys file {path}: sha256 of key {number} must be 64 lowercase hexadecimal digits")
    try:
        tenant, mode = check_name("tenant", fields["tenant"]), CacheMode(fields["cache"])
        return ApiKey(check_name("id", fields["id"]), fields["sha256"], tenant, mode)
    except InvalidRequestError as error:
        raise ConfigurationError(f"keys file {path}: key {number}: {error.message}") from error


def _single_header(headers: Headers, name: str) -> str | None:
    """Return the header's value; two values would let a client smuggle its own past a proxy that appends."""
    values = headers.getlist(name)
    if not values or values == [""]:
        return None
    if len(values) > 1:
        raise InvalidRequestError(f"The header {name} must occur only once.", param=name)
    return check_name(name, values[0])
