"""The form of a stored page: a header that says what it is, and a checksum over all of it.

Little-endian: magic [8], version u32, payload bytes u64, layout [32], key [32], checksum [16], payload. `layout` is a
digest of everything that makes pages interchangeable (model, dtype, page size, shard), `key` the storage key the page
was written under, and the checksum is XXH3-128 of what comes before it and of the payload. So an object that was cut,
altered, moved to another name or written by another model or rank is recognised; what somebody has forged is not:
storage has to be as trustworthy as the hosts that share it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum

from xxhash import xxh3_128

MAGIC = b"PandoKV\n"
VERSION = 1
KEY_BYTES = 32
_PREFIX = struct.Struct("<8sIQ32s32s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _PREFIX.size + _CHECKSUM_BYTES


class Miss(Enum):
    """Why a page cannot be had from storage, as metrics name it."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    FOREIGN_LAYOUT = "foreign_layout"
    SLOW = "slow"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """What objects of one rank look like.

    `fingerprint` is `EngineCapacity.fingerprint`, `page_bytes` the length of every payload.
    """

    fingerprint: str
    page_bytes: int

    @property
    def layout(self) -> bytes:
        """The layout's digest, [32]."""
        return hashlib.sha256(f"{self.fingerprint}\n{self.page_bytes}".encode()).digest()

    def name(self, key: bytes) -> str:
        """Return the name of the page with this storage key; each rank and model that shares a storage has its own."""
        return f"{self.layout[:8].hex()}-{key.hex()}"

    def encode(self, key: bytes, payload: bytes) -> bytes:
        """Return the object that holds `payload`, [page_bytes]."""
        assert len(key) == KEY_BYTES
        assert len(payload) == self.page_bytes
        prefix = _PREFIX.pack(MAGIC, VERSION, len(payload), self.layout, key)
        return b"".join((prefix, _checksum(prefix, memoryview(payload)), payload))

    def decode(self, key: bytes, data: bytes) -> memoryview | Miss:
        """Return the payload of an object read under `key`, or why it must not be used."""
        if len(data) < HEADER_BYTES:
            return Miss.TRUNCATED
        magic, version, length, layout, written_key = _PREFIX.unpack_from(data)
        if (magic, version) != (MAGIC, VERSION):
            return Miss.CORRUPT
        payload = memoryview(data)[HEADER_BYTES:]
        if len(payload) < length:
            return Miss.TRUNCATED
        if data[_PREFIX.size : HEADER_BYTES] != _checksum(data[: _PREFIX.size], payload):
            return Miss.CORRUPT
        if layout != self.layout or length != self.page_bytes:
            return Miss.FOREIGN_LAYOUT
        # A whole object under a name that is not its own holds other tokens.
        return payload if written_key == key else Miss.CORRUPT


def _checksum(prefix: bytes, payload: memoryview) -> bytes:
    hasher = xxh3_128(prefix)
    hasher.update(payload)
    return hasher.digest()
