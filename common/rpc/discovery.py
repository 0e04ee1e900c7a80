"""Discovery of the servers of one kind: from a static list, or by DNS."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

DNS = "dns:"


def is_looked_up(address: str) -> bool:
    """Whether a configured address stands for all addresses of a host name."""
    return address.startswith(DNS)


@dataclass(frozen=True, slots=True)
class Found:
    """A server's address. `name` is the host name that resolved to it, if any, which its certificate must carry."""

    address: str
    name: str | None = None


class Discovery:
    """Resolves configured addresses to servers; `dns:host:port` stands for all addresses of the host name."""

    def __init__(
        self, configured: Sequence[str], resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None
    ) -> None:
        """`resolve(host, port)` returns addresses of the form host:port, or raises OSError."""
        self._configured = configured
        self._resolve = resolve or resolve_name
        self._known: dict[str, tuple[str, ...]] = {}

    async def look(self) -> tuple[Found, ...]:
        """Return the current servers, each once. While a name cannot be resolved, its last known addresses are used."""
        found: dict[str, Found] = {}
        for configured in self._configured:
            if not is_looked_up(configured):
                found.setdefault(configured, Found(configured))
                continue
            host, _, port = configured.removeprefix(DNS).rpartition(":")
            for address in await self._addresses_of(configured, host, int(port)):
                found.setdefault(address, Found(address, host))
        return tuple(found.values())

    async def _addresses_of(self, configured: str, host: str, port: int) -> tuple[str, ...]:
        try:
            self._known[configured] = tuple(sorted(await self._resolve(host, port)))
        except OSError as error:
            get_logger("discovery").warning("name.unresolved", name=configured, reason=str(error))
        return self._known.get(configured, ())


async def resolve_name(host: str, port: int) -> list[str]:
    """Return all addresses of `host`, as host:port.

    Raises:
        OSError: the host cannot be resolved.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [f"[{name[0]}]:{port}" if family == socket.AF_INET6 else f"{name[0]}:{port}" for family, *_, name in found]
