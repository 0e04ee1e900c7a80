"""Where the servers of one kind are: a static list, or whatever a name resolves to now."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

DNS = "dns:"


@dataclass(frozen=True, slots=True)
class Found:
    """A server: its address, and if it was found by a name, that name, which is also the one in its certificate."""

    address: str
    name: str | None = None


class Discovery:
    """Turns configured addresses into those of servers; `dns:host:port` stands for all addresses behind the host."""

    def __init__(
        self, configured: Sequence[str], resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None
    ) -> None:
        """Know the configured addresses; `resolve(host, port)` returns addresses of the form host:port."""
        self._configured = configured
        self._resolve = resolve or resolve_name
        self._known: dict[str, tuple[str, ...]] = {}

    async def look(self) -> tuple[Found, ...]:
        """Return the servers of now, each once; while a name cannot be resolved, those that it had before."""
        found: dict[str, Found] = {}
        for configured in self._configured:
            if not configured.startswith(DNS):
                found.setdefault(configured, Found(configured))
                continue
            host, _, port = configured.removeprefix(DNS).rpartition(":")
            for address in await self._addresses_behind(configured, host, int(port)):
                found.setdefault(address, Found(address, host))
        return tuple(found.values())

    async def _addresses_behind(self, configured: str, host: str, port: int) -> tuple[str, ...]:
        try:
            self._known[configured] = tuple(sorted(await self._resolve(host, port)))
        except OSError as error:
            get_logger("discovery").warning("name.unresolved", name=configured, reason=str(error))
        return self._known.get(configured, ())


async def resolve_name(host: str, port: int) -> list[str]:
    """Return all addresses behind `host`, as host:port.

    Raises:
        OSError: it cannot be resolved.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [f"[{name[0]}]:{port}" if family == socket.AF_INET6 else f"{name[0]}:{port}" for family, *_, name in found]
