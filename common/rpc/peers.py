"""The servers of one kind that a client uses side by side: found by discovery, each with its own connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from common.logs import get_logger
from common.rpc.channel import is_serving, open_channel
from common.rpc.discovery import Discovery
from common.rpc.security import UNIX_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import grpc

    from common.rpc.discovery import Found
    from common.rpc.security import Security

DISCOVERY_INTERVAL_S = 2.0
HEALTH_INTERVAL_S = 1.0


class ConnectedPeer(Protocol):
    """One server, with the stream to it."""

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open."""

    async def run(self) -> None:
        """Keep the stream open until cancelled; then close the connection."""


PeerT = TypeVar("PeerT", bound=ConnectedPeer)
CandidateT = TypeVar("CandidateT")


@dataclass(frozen=True, slots=True)
class Servers:
    """The addresses of servers of one kind, and the way to connect to one."""

    discovery: Discovery
    connect: Callable[[Found], grpc.aio.Channel]


def servers_at(addresses: Sequence[str], security: Security = UNIX_ONLY) -> Servers:
    """Return the servers at `addresses`, of which `dns:host:port` stands for all addresses of the host name."""
    return Servers(Discovery(addresses), lambda found: open_channel(found.address, security, found.name))


class Peers(Generic[PeerT]):
    """Keeps a peer for each server that discovery finds.

    A server that discovery no longer finds is kept until its stream breaks: it may have to finish requests.
    """

    def __init__(
        self,
        kind: str,
        servers: Servers,
        open_peer: Callable[[grpc.aio.Channel], PeerT],
        interval_s: float = DISCOVERY_INTERVAL_S,
    ) -> None:
        """Open peers with `open_peer`, which own their channels; `kind` is their name in logs."""
        self._kind = kind
        self._servers = servers
        self._open_peer = open_peer
        self._interval_s = interval_s
        self._peers: dict[str, PeerT] = {}
        self._log = get_logger("peers")

    def __iter__(self) -> Iterator[PeerT]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def connected(self) -> list[PeerT]:
        """The peers with an open stream."""
        return [peer for peer in self._peers.values() if peer.is_connected]

    async def run(self) -> None:
        """Look for servers and keep the streams to them open until cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                found = {server.address: server for server in await self._servers.discovery.look()}
                for address in [address for address in found if address not in running]:
                    self._log.info("peer.found", kind=self._kind, address=address)
                    peer = self._open_peer(self._servers.connect(found[address]))
                    self._peers[address] = peer
                    running[address] = tasks.create_task(peer.run())
                for address in running.keys() - found.keys():
                    if not self._peers[address].is_connected:
                        self._log.info("peer.gone", kind=self._kind, address=address)
                        del self._peers[address]
                        running.pop(address).cancel()
                await asyncio.sleep(self._interval_s)


class Health:
    """The health that a server reports, asked for each second."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        """Ask for the health of `service` (full name); until the first answer, it counts as serving."""
        self.is_serving = True
        self._channel = channel
        self._service = service

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self.is_serving = await is_serving(self._channel, self._service)
            await asyncio.sleep(HEALTH_INTERVAL_S)


class Balance:
    """Selects the candidate with the least load, and among equals each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[CandidateT], load: Callable[[CandidateT], int]) -> CandidateT:
        """Return one of `candidates`, which are not empty."""
        self._turn += 1
        first = self._turn % len(candidates)
        return min((*candidates[first:], *candidates[:first]), key=load)
