"""The form of a stored page or snapshot: a header that says what it is, then the content, encrypted and authenticated.

Little-endian: magic [8], version u32, payload bytes u64, layout [32], name [32], nonce [12], ciphertext, tag [16].
`layout` is a digest of everything that makes pages interchangeable (weights, config, dtype, page size, shard), `name`
the storage key the page was written under. The cipher is AES-256-GCM (NIST SP 800-38D); all of the header before the
nonce is its associated data. Each object has a key of its own, which HKDF-Expand derives from the transfer's key, the
layout and the name, and each write a random nonce: so a key encrypts only the few writes of one page, and random nonces
of 96 bits do not repeat.

An object that was cut, altered, forged, written by another model or rank, for another scope or under a key that has
been destroyed, or copied to another name is a miss. What cannot be recognised is an earlier object of the same name and
key: it holds KV of the same tokens, scope, weights and layout, so it is equal up to the last bits that computing in
another batch may change.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

if TYPE_CHECKING:
    from services.worker.storage.interface import Blob

MAGIC = b"PandoKV\n"
VERSION = 2
KEY_BYTES = 32
_HEADER = struct.Struct("<8sIQ32s32s")
_NONCE_BYTES = 12
_TAG_BYTES = 16
_PAYLOAD_START = _HEADER.size + _NONCE_BYTES
# Bytes of an object beyond those of its page.
OVERHEAD_BYTES = _PAYLOAD_START + _TAG_BYTES


class Miss(Enum):
    """Why a page cannot be had from storage, as metrics name it."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    # Not an object, or of another version.
    CORRUPT = "corrupt"
    FOREIGN_LAYOUT = "foreign_layout"
    # Altered, forged, moved to another name, or encrypted with another key.
    NOT_AUTHENTIC = "not_authentic"
    SLOW = "slow"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """The format of one rank's objects.

    `fingerprint` is `EngineCapacity.fingerprint`. Every payload is a page of `page_bytes`, or a snapshot of recurrent
    states of `state_bytes` if these are given; the names of both are alike.
    """

    fingerprint: str
    page_bytes: int
    state_bytes: int | None = None

    @property
    def payload_bytes(self) -> int:
        """The length of every payload."""
        return self.page_bytes if self.state_bytes is None else self.state_bytes

    @property
    def layout(self) -> bytes:
        """The layout's digest, [32]."""
        return hashlib.sha256(f"{self.fingerprint}\n{self.page_bytes}".encode()).digest()

    def name(self, key: bytes) -> str:
        """Return the name of the object with this storage key; each rank and model that shares a storage has one."""
        return f"{self.layout[:16].hex()}-{key.hex()}"

    def encode(self, key: bytes, cipher_key: bytes, payload: bytes) -> memoryview:
        """Return the object that holds `payload`, [payload_bytes]."""
        assert len(key) == len(cipher_key) == KEY_BYTES
        assert len(payload) == self.payload_bytes
        data = memoryview(bytearray(self.payload_bytes + OVERHEAD_BYTES))
        header, nonce = self._header(key), os.urandom(_NONCE_BYTES)
        data[: _HEADER.size] = header
        data[_HEADER.size : _PAYLOAD_START] = nonce
        self._cipher(key, cipher_key).encrypt_into(nonce, payload, header, data[_PAYLOAD_START:])
        return data

    def decode(self, key: bytes, cipher_key: bytes, data: Blob) -> memoryview | Miss:
        """Return the payload of an object read under `key`, or why it must not be used."""
        if len(data) < OVERHEAD_BYTES:
            return Miss.TRUNCATED
        magic, version, length, layout, _ = _HEADER.unpack_from(data)
        if (magic, version) != (MAGIC, VERSION):
            return Miss.CORRUPT
        if layout != self.layout or length != self.payload_bytes:
            return Miss.FOREIGN_LAYOUT
        if len(data) < length + OVERHEAD_BYTES:
            return Miss.TRUNCATED
        view = memoryview(data)
        if len(data) > length + OVERHEAD_BYTES or view[: _HEADER.size] != self._header(key):
            return Miss.NOT_AUTHENTIC
        payload = memoryview(bytearray(self.payload_bytes))
        nonce, sealed = view[_HEADER.size : _PAYLOAD_START], view[_PAYLOAD_START:]
        try:
            self._cipher(key, cipher_key).decrypt_into(nonce, sealed, view[: _HEADER.size], payload)
        except InvalidTag:
            return Miss.NOT_AUTHENTIC
        return payload

    def _header(self, key: bytes) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.payload_bytes, self.layout, key)

    def _cipher(self, key: bytes, cipher_key: bytes) -> AESGCM:
        info = b"pando stored page" + self.layout + key
        return AESGCM(HKDFExpand(SHA256(), KEY_BYTES, info).derive(cipher_key))
