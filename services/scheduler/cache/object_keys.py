"""Names and keys of stored pages, derived from a random seed in the keyring.

The seed belongs to one generation of one scope: HKDF-SHA256 (RFC 5869) derives from it, with the deployment's secret as
salt and the scope as info, a key for names and a key for encryption. A page's name is HMAC-SHA256(naming key, chained
page hash); the hash covers the page's tokens and all preceding ones. So without the seed it is impossible to compute a
name or to read a page, even with the names, pages and keys of other scopes, and destroying the seed makes it impossible
for all parties.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.cache.types import Scope

KEY_BYTES = 32
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """Names of a run of pages of one scope in storage, [32] each, and their encryption key, [32]."""

    names: tuple[bytes, ...]
    cipher_key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ScopeKeys:
    """The keys of one generation of one scope, [32] each."""

    naming: bytes = field(repr=False)
    cipher: bytes = field(repr=False)

    def of_pages(self, hashes: Iterable[bytes]) -> ObjectKeys:
        """Return names and key of pages by their chained hashes, see `chain_hashes`; takes 2 µs per page."""
        return ObjectKeys(tuple(hmac.digest(self.naming, chain, "sha256") for chain in hashes), self.cipher)


def scope_keys(secret: bytes, seed: bytes, scope: Scope) -> ScopeKeys:
    """Derive a scope's keys.

    Args:
        secret: The secret of the deployments that share a storage.
        seed: The random seed of the generation; scopes that are forgotten together may share one.
        scope: The owner of the pages: a view, a tenant or the public.
    """
    derived = HKDF(SHA256(), 2 * KEY_BYTES, secret, b"pando stored pages" + _encode(scope)).derive(seed)
    return ScopeKeys(derived[:KEY_BYTES], derived[KEY_BYTES:])


def scope_tag(secret: bytes, scope: Scope) -> bytes:
    """Return a pseudonym of a scope for a file without names, [16]."""
    return hmac.digest(secret, b"scope" + _encode(scope), "sha256")[:16]


def _encode(scope: Scope) -> bytes:
    # Length prefixes make the encoding injective.
    parts = [part.encode("utf-8", "surrogatepass") for part in scope]
    return _LENGTH.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) + part for part in parts)
