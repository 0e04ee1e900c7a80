"""Lua scripts that run in a Redis or Valkey server."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from redis.commands.core import AsyncScript
from redis.exceptions import ResponseError

if TYPE_CHECKING:
    from redis.asyncio import Redis


class DamagedScriptError(ResponseError):
    """The server has received another script than it was sent."""


class LuaScript(AsyncScript):
    """A script that the server runs only as it was sent.

    The library runs whatever the server has received, again and again: on a link without TLS, one flipped bit would
    change the rules for as long as the server keeps the script.
    """

    def __init__(self, redis: Redis, package: str, file: str) -> None:
        """Read the script `file` of `package` for calls to `redis`, or to a pipeline of it; nothing is sent yet."""
        self._digest: str | None = None
        super().__init__(redis, resources.files(package).joinpath(file).read_text())

    @property
    def sha(self) -> str:
        """The SHA-1 digest by which the server knows the script, in hexadecimal.

        The library sets it, first to the script's own and after each upload to that of what the server received.

        Raises:
            DamagedScriptError: (on setting) the server received something else.
        """
        assert self._digest is not None, "the constructor has set it"
        return self._digest

    @sha.setter
    def sha(self, received: str | bytes) -> None:
        digest = received.decode(errors="replace") if isinstance(received, bytes) else received
        if self._digest is None:
            self._digest = digest
        elif digest != self._digest:
            raise DamagedScriptError(f"the server received a damaged script {digest} instead of {self._digest}")
