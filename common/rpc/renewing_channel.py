"""A TLS channel whose certificates may be renewed while it is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.rpc.security import Pem


class RenewingChannel(grpc.aio.Channel):
    """Makes each call on a channel with the certificates of now; calls that are open stay where they are.

    A stub is made once and keeps what it was given, so that is what looks for the channel at each call.
    """

    def __init__(self, load: Callable[[], Pem], connect: Callable[[Pem], grpc.aio.Channel]) -> None:
        """Connect with what `load` returns, and again whenever that is something else."""
        self._load = load
        self._connect = connect
        self._pem = load()
        # The last one is in use. The others have open calls, perhaps for hours, and certificates live for weeks.
        self._channels = [connect(self._pem)]

    def current(self) -> grpc.aio.Channel:
        """Return the channel for the next call."""
        pem = self._load()
        if pem != self._pem:
            self._pem = pem
            self._channels.append(self._connect(pem))
        return self._channels[-1]

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method; likewise the three below."""
        return self._late("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See `unary_unary`."""
        return self._late("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See `unary_unary`."""
        return self._late("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See `unary_unary`."""
        return self._late("stream_stream", arguments, options)

    # Arguments and results are those of grpc's own methods, whatever the messages.
    def _late(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        def call(*call_arguments: Any, **call_options: Any) -> Any:
            method = getattr(self.current(), kind)(*arguments, **options)
            return method(*call_arguments, **call_options)

        return call

    async def __aenter__(self) -> RenewingChannel:
        """Return this channel."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close it."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close everything, after `grace` seconds for open calls."""
        for channel in self._channels:
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the channel that the next call would use."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until that channel is in another state."""
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until that channel is connected."""
        await self.current().channel_ready()
