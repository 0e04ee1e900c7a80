"""Connections to all scheduler groups that exist now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.gen.pando.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from common.rpc.discovery import Discovery, Found


class SchedulerGroups:
    """Keeps a channel to each group that `discovery` finds."""

    def __init__(self, discovery: Discovery, connect: Callable[[Found], grpc.aio.Channel]) -> None:
        self._discovery = discovery
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def stubs(self) -> list[scheduler_pb2_grpc.SchedulerAsyncStub]:
        """Return a stub for each group that exists now; channels to removed groups are closed."""
        found = {group.address: group for group in await self._discovery.look()}
        for address in self._channels.keys() - found.keys():
            await self._channels.pop(address).close()
        for address, group in found.items():
            if address not in self._channels:
                self._channels[address] = self._connect(group)
        return [scheduler_pb2_grpc.SchedulerStub(self._channels[address]) for address in found]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
