"""The client side of gRPC connections: channels that use renewed certificates, and health checks of peers."""

from __future__ import annotations

import abc
import asyncio
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import PandoError, UnavailableError
from common.rpc.options import CHANNEL_OPTIONS
from common.rpc.security import UNIX_ONLY
from common.rpc.status import RETRY_AFTER_MS, answered

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.rpc.security import Pem, Security


# None: a connection without TLS.
PemT = TypeVar("PemT", bound="Pem | None")
CLOSE_GRACE_S = 5.0


def open_channel(address: str, security: Security = UNIX_ONLY, certified_as: str | None = None) -> RenewingChannel[Any]:
    """Open a channel to the service at host:port or unix:path.

    `certified_as` is the name that the service's certificate must have, if it is not the address's host.

    Raises:
        ConfigurationError: the address is TCP, and `security` does not allow TCP.
    """
    if not security.needs_tls(address):
        return RenewingChannel(lambda: None, lambda _: grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))

    options = [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", certified_as)] if certified_as else [])]

    def connect(pem: Pem) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, security.channel_credentials(pem), options=options)

    return RenewingChannel(security.load, connect)


def renew(channel: grpc.aio.Channel) -> None:
    """Let the next call on a channel of `open_channel` use another connection."""
    if isinstance(channel, RenewingChannel):
        channel.renew()


async def is_serving(channel: grpc.aio.Channel, service: str, timeout_s: float = 1.0) -> bool:
    """Whether the peer's health service reports `service` (full name, or "" for the process) as serving."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # Any: its type stubs lack the methods
    try:
        answer = await answered(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s))
    except PandoError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class LateChannel(grpc.aio.Channel):
    """A channel that selects another one for each call; a call raises UnavailableError if that is closed.

    A stub binds its methods once, at its creation, so the callables returned here select the channel at each call.
    """

    @abc.abstractmethod
    def current(self) -> grpc.aio.Channel:
        """Return the channel for the next call."""

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a callable for a method; it selects the channel when it is called."""
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

    # Any: arguments and results are those of grpc's own methods, for every message type.
    def _late(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        def call(*call_arguments: Any, **call_options: Any) -> Any:
            try:
                method = getattr(self.current(), kind)(*arguments, **options)
                return method(*call_arguments, **call_options)
            except grpc.aio.UsageError as error:
                raise UnavailableError("the connection is closed", retry_after_ms=RETRY_AFTER_MS) from error

        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the channel that the next call would use."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the channel of the next call has another state than `last_observed_state`."""
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel of the next call is connected."""
        await self.current().channel_ready()


class BalancedChannel(LateChannel):
    """Makes each call on one of several channels, which others own."""

    def __init__(self, choose: Callable[[], grpc.aio.Channel]) -> None:
        """`choose` returns the channel for a call, or raises PandoError if there is none."""
        self._choose = choose

    def current(self) -> grpc.aio.Channel:
        """Return the channel for the next call.

        Raises:
            PandoError: there is none.
        """
        return self._choose()

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: the channels' owners close them."""


class RenewingChannel(LateChannel, Generic[PemT]):
    """Makes each new call on a channel with the current certificates; open calls stay on their channel.

    `renew` replaces the channel, and with it the connection.
    """

    def __init__(self, load: Callable[[], PemT], connect: Callable[[PemT], grpc.aio.Channel]) -> None:
        """Open a channel with the certificates that `load` returns, and another one whenever they change."""
        self._load = load
        self._connect = connect
        self._pem = load()
        # New calls use the last channel. Older ones may have open calls for hours; they are few, as certificates are
        # valid for weeks.
        self._channels = [connect(self._pem)]
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """Return the channel for the next call."""
        pem = self._load()
        if pem != self._pem:
            self._pem = pem
            self._channels.append(self._connect(pem))
        return self._channels[-1]

    def renew(self) -> None:
        """Replace the channel of the next call; open calls of the old one have a few seconds to end."""
        closing = asyncio.create_task(self._channels.pop().close(CLOSE_GRACE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._channels.append(self._connect(self._pem))

    async def close(self, grace: float | None = None) -> None:
        """Close all channels, each after up to `grace` seconds for its open calls."""
        for channel in self._channels:
            await channel.close(grace)
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
