"""Where the scheduler groups are: a static list, or whatever a name resolves to now."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

DNS = "dns:"


class Discovery:
    """Turns configured addresses into those of groups; `dns:host:port` stands for all addresses behind the host."""

    def __init__(
        self, configured: Sequence[str], resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None
    ) -> None:
        """Know the configured addresses; `resolve(host, port)` returns addresses of the form host:port."""
        self._configured = configured
        self._resolve = resolve or resolve_name
        self._known: dict[str, tuple[str, ...]] = {}

    async def look(self) -> tuple[str, ...]:
        """Return the addresses of now, each once; while a name cannot be resolved, those that it had before."""
        found: dict[str, None] = {}
        for address in self._configured:
            if address.startswith(DNS):
                found |= dict.fromkeys(await self._addresses_behind(address))
            else:
                found[address] = None
        return tuple(found)

    async def _addresses_behind(self, address: str) -> tuple[str, ...]:
        host, _, port = address.removeprefix(DNS).rpartition(":")
        try:
            self._known[address] = tuple(sorted(await self._resolve(host, int(port))))
        except OSError as error:
            get_logger("discovery").warning("name.unresolved", name=address, reason=str(error))
        return self._known.get(address, ())


async def resolve_name(host: str, port: int) -> list[str]:
    """Return all addresses behind `host`, as host:port.

    Raises:
        OSError: it cannot be resolved.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [f"[{name[0]}]:{port}" if family == socket.AF_INET6 else f"{name[0]}:{port}" for family, *_, name in found]
