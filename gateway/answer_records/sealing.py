"""Encryption of records in a server that gateways share."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PLAIN, SEALED = b"\x00", b"\x01"
NONCE_BYTES = 12
CIPHERS = 4096


class UnsealedError(Exception):
    """Content that was not written by a gateway with the same secret, or not at this place."""


class Sealing:
    """Encrypts and authenticates content with a secret that all gateways share (AES-256-GCM).

    Each record has its own key, so that random nonces do not repeat. The place of a content, such as the number of a
    chunk, is authenticated with it. Without a secret, content is stored as it is.
    """

    def __init__(self, secret: str | None) -> None:
        self._key = None if secret is None else hashlib.sha256(b"pando.answers\0" + secret.encode()).digest()
        # Of the records in use: a cipher is made once, and used for every token.
        self._cipher = lru_cache(maxsize=CIPHERS)(self._make_cipher)

    def seal(self, record: str, place: str, content: bytes) -> bytes:
        if self._key is None:
            return PLAIN + content
        nonce = secrets.token_bytes(NONCE_BYTES)
        return SEALED + nonce + self._cipher(record).encrypt(nonce, content, place.encode())

    def open(self, record: str, place: str, sealed: bytes) -> bytes:
        """Return the content.

        Raises:
            UnsealedError: it cannot be trusted.
        """
        if self._key is None:
            if sealed[:1] != PLAIN:
                raise UnsealedError("it is encrypted, and this gateway has no gateway.state.secret")
            return sealed[1:]
        if sealed[:1] != SEALED:
            raise UnsealedError("it is not encrypted with gateway.state.secret")
        nonce, content = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            return self._cipher(record).decrypt(nonce, content, place.encode())
        except (InvalidTag, ValueError) as error:
            raise UnsealedError("it is not encrypted with gateway.state.secret of this gateway") from error

    def _make_cipher(self, record: str) -> AESGCM:
        assert self._key is not None
        return AESGCM(hmac.digest(self._key, record.encode(), "sha256"))
