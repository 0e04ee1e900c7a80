"""Signed messages between gateways, over a server to which others may be able to write."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

# A message is refused when it is older, or when the clocks of sender and receiver differ by more.
VALID_S = 30.0
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 16_384


class RefusedError(Exception):
    """A message that is not signed with the secret, too old, received before, or malformed."""


class Signatures:
    """Signs messages with a secret that all gateways share (HMAC-SHA256), and accepts each message once.

    Without a secret, messages are not signed, and every client of the server can forge them.
    """

    def __init__(self, secret: str | None, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns Unix time in seconds."""
        self._key = None if secret is None else hashlib.sha256(b"pando.aborts\0" + secret.encode()).digest()
        self._clock = clock
        # Nonces of messages that may still be valid, in order of arrival, each with the time of its expiry.
        self._received: dict[str, float] = {}

    @property
    def are_made(self) -> bool:
        """Whether there is a secret."""
        return self._key is not None

    def seal(self, content: dict[str, Any]) -> bytes:  # Any: JSON
        """Return `content` as a signed message."""
        body = orjson.dumps({**content, "at": self._clock(), "nonce": secrets.token_hex(16)})
        return self._mac(body) + body

    def open(self, message: bytes) -> dict[str, Any]:  # Any: JSON
        """Verify a message and return its content.

        Raises:
            RefusedError: the message is not trusted.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise RefusedError("it is too long")
        length = MAC_BYTES if self.are_made else 0
        mac, body = message[:length], message[length:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise RefusedError("it is not signed with gateway.state.secret of this gateway")
        try:
            content = orjson.loads(body)
            at, nonce = float(content["at"]), str(content["nonce"])
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError("it is malformed") from error
        now = self._clock()
        if not abs(now - at) <= VALID_S:
            raise RefusedError("it is too old, or the clocks of the gateways differ")
        if self.are_made:
            self._note(nonce, now)
        return dict(content)

    def _note(self, nonce: str, now: float) -> None:
        while self._received and next(iter(self._received.values())) < now:
            del self._received[next(iter(self._received))]
        if nonce in self._received:
            raise RefusedError("it was received before")
        # A sender's clock may be ahead by VALID_S, and its message stays valid for VALID_S after that.
        self._received[nonce] = now + 2 * VALID_S

    def _mac(self, body: bytes) -> bytes:
        return b"" if self._key is None else hmac.digest(self._key, body, "sha256")
