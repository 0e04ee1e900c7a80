"""Keyed names under which scheduler groups and tokenizers share facts about prefixes.

All names are HMAC-SHA256 with a key derived from the fleet's secret, so the state server can neither compute the name
of a text nor compare names with texts. A subject's tag is different for each prefix, so tags do not connect the
prefixes of one subject.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from common.types import TokenIds

# Leading tokens by which prompts count as equal for routing: enough to distinguish system prompts.
PREFIX_TOKENS = 64
NAME_BYTES = 16
_LENGTH = struct.Struct("<Q")


class FleetKeys:
    """The keys derived from the secret of a fleet."""

    def __init__(self, secret: str) -> None:
        """Derive the keys; `secret` has at least 32 characters that cannot be guessed."""
        self._naming = hmac.digest(secret.encode(), b"pando fleet names", "sha256")
        # For facts that only members may read: AES-256-GCM.
        self.sealing = hmac.digest(secret.encode(), b"pando fleet facts", "sha256")
        # Fleets with different secrets can use one server without affecting each other.
        self.root = "pando:fleet:{" + hmac.digest(secret.encode(), b"pando fleet root", "sha256")[:8].hex() + "}"

    def chain(self, scope: tuple[str, ...], chain: bytes) -> bytes:
        """Return the name of a prefix, given by its chained page hash, in the scope of a tenant or of the public."""
        return self._name(b"chain", *map(_encoded, scope), chain)

    def routing(self, scope: tuple[str, ...], digest: bytes) -> bytes:
        """Return the name of the first tokens of prompts, given by `routing_digest`."""
        return self._name(b"routing", *map(_encoded, scope), digest)

    def block(self, scope: tuple[str, ...], chain: bytes) -> int:
        """Return the 64-bit name of a cached page in KV events, given by its chained page hash.

        Args:
            scope: () for a public page, (tenant,) for a tenant's, (tenant, subject, salt) for a private one.
            chain: BLAKE2b hash [32] of the page before (nothing for the first) and the page's tokens, little-endian
                int32.
        """
        return int.from_bytes(self._name(b"block", *map(_encoded, scope), chain)[:8], "little")

    def window(self, scope: tuple[str, ...], chain: bytes, party: tuple[str, ...]) -> bytes:
        """Return the name of a party's hits on a prefix, given by its chained page hash in the scope of its owner."""
        return self._name(b"window", *_scoped(scope), chain, *_scoped(party))

    def mark(self, name: bytes, *facts: int | bytes) -> bytes:
        """Return a mark by which equal facts about the window `name` are counted once."""
        return self._name(b"mark", name, *(fact if isinstance(fact, bytes) else b"%d" % fact for fact in facts))

    def tag(self, name: bytes, tenant: str, subject: str) -> bytes:
        """Return the tag of a subject at the prefix `name`."""
        return self._name(b"subject", name, _encoded(tenant), _encoded(subject))

    def _name(self, *parts: bytes) -> bytes:
        # Length prefixes make the encoding injective.
        text = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
        return hmac.digest(self._naming, text, "sha256")[:NAME_BYTES]


def routing_digest(token_ids: TokenIds) -> bytes | None:
    """Return a hash of a prompt's first `PREFIX_TOKENS` tokens, [16]; None if it has fewer."""
    if len(token_ids) < PREFIX_TOKENS:
        return None
    leading = np.ascontiguousarray(token_ids[:PREFIX_TOKENS], dtype="<u4").tobytes()
    return blake2b(leading, digest_size=16).digest()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _scoped(scope: tuple[str, ...]) -> tuple[bytes, ...]:
    return b"%d" % len(scope), *map(_encoded, scope)
