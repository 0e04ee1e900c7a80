"""Fetches images from URLs for clients, without letting them reach anything but public servers.

Every connection, that to the target of a redirect included, is made to an address that was resolved and checked here;
the name is not resolved again in between. No cookies, credentials or proxies of the environment are used.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, TypeAlias

import httpcore
import httpx

from common.room import SharedRoom
from gateway.images.addresses import is_public
from gateway.images.images import RefusedUrlError

if TYPE_CHECKING:
    from common.types import Subject

Address: TypeAlias = IPv4Address | IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[Address]]]

MAX_REDIRECTS: Final = 3
REDIRECTS: Final = (301, 302, 303, 307, 308)
# At the same time, over all clients.
MAX_FETCHES: Final = 32
RETRY_AFTER_MS: Final = 1000
# Addresses of a host that are tried.
MAX_ADDRESSES: Final = 3
RESOLVERS: Final = 8
DEFAULT_PORTS: Final = {"https": 443, "http": 80}
HEADERS: Final = [("user-agent", "pando"), ("accept", "image/*, video/*"), ("accept-encoding", "identity")]
NOT_PUBLIC: Final = "cannot be fetched: its host has no public address"


@dataclass(frozen=True, slots=True)
class UrlRules:
    """The URLs that may be fetched.

    `hosts` are patterns of host names (`images.example`, `*.example`), of the default ports unless they end in a port.
    """

    hosts: tuple[str, ...]
    allows_http: bool = False
    timeout_s: float = 10.0

    def check(self, text: str | httpx.URL) -> httpx.URL:
        """Return a URL that may be fetched.

        Raises:
            RefusedUrlError: it may not.
        """
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise RefusedUrlError(f"has no valid URL: {error}") from error
        if url.scheme not in ("https", "http") or (url.scheme == "http" and not self.allows_http):
            raise RefusedUrlError("is at a URL that does not begin with https")
        if url.userinfo:
            raise RefusedUrlError("is at a URL with credentials, which is not fetched")
        if not self._allows(url):
            raise RefusedUrlError("is at a host that is not among those of gateway.images.urls")
        return url

    def _allows(self, url: httpx.URL) -> bool:
        names = {url.raw_host.decode("ascii").lower().rstrip("."), url.host.lower().rstrip(".")}
        port = url.port or DEFAULT_PORTS[url.scheme]
        for pattern in self.hosts:
            host, _, stated = pattern.lower().partition(":")
            is_port = port == int(stated) if stated else port == DEFAULT_PORTS[url.scheme]
            if is_port and any(fnmatchcase(name, host) for name in names):
                return True
        return False


class NotPublicError(httpcore.ConnectError):
    """A host has no address, or one that is not public."""


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """Connects to hosts all of whose addresses are public."""

    def __init__(self, resolve: Resolve, network: httpcore.AsyncNetworkBackend) -> None:
        """Addresses come from `resolve`; `network` connects to them."""
        self._resolve = resolve
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to one of the addresses of `host`.

        Raises:
            NotPublicError: it has none, or not only public ones.
            httpcore.NetworkError: none of them answers.
        """
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise NotPublicError
        failure: Exception = httpcore.ConnectError()
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface's
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Refuse; no URL names a socket."""
        raise NotPublicError

    async def sleep(self, seconds: float) -> None:
        """Sleep between attempts to connect, of which there is one only."""
        await asyncio.sleep(seconds)


class Resolver:
    """Resolves host names in threads of its own, so that slow name servers delay nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVERS, "image-hosts")

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Return all addresses of `host`; none if it does not exist."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host, port)
        except (OSError, UnicodeError):
            return ()
        return tuple(dict.fromkeys(ip_address(each) for each in found))

    def close(self) -> None:
        """Release the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class RemoteImages:
    """Implements `gateway.images.images.ImageFetcher`."""

    def __init__(
        self,
        rules: UrlRules,
        resolve: Resolve | None = None,
        network: httpcore.AsyncNetworkBackend | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """Fetch what `rules` allow.

        Tests pass `resolve`, which looks hosts up, `network`, which connects, and `trust`, the certificates to trust.
        """
        self._resolver = Resolver()
        self._rules = rules
        self._room = SharedRoom(MAX_FETCHES, "fetching images", RETRY_AFTER_MS)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=trust or ssl.create_default_context(),
            max_connections=MAX_FETCHES,
            # Each fetch resolves the name and connects again.
            max_keepalive_connections=0,
            network_backend=PublicNetwork(resolve or self._resolver.resolve, network or httpcore.AnyIOBackend()),
        )

    async def fetch(self, url: str, subject: Subject, max_bytes: int) -> bytes:
        """Return the bytes at `url`, whatever their content type says.

        Raises:
            RefusedUrlError: the URL may not be fetched, or there is no answer of up to `max_bytes` in time.
            QueueFullError: too many images are fetched now.
        """
        self._room.take(subject)
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                return await self._fetch(url, max_bytes)
        except NotPublicError:
            raise RefusedUrlError(NOT_PUBLIC) from None
        except (TimeoutError, httpcore.TimeoutException):
            raise RefusedUrlError(f"could not be fetched within {self._rules.timeout_s:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, ssl.SSLError) as error:
            raise RefusedUrlError("could not be fetched: the connection to its host failed") from error
        finally:
            self._room.give_back(subject)

    async def close(self) -> None:
        """Close all connections."""
        self._resolver.close()
        await self._pool.aclose()

    async def _fetch(self, first: str, max_bytes: int) -> bytes:
        url = self._rules.check(first)
        for _ in range(MAX_REDIRECTS + 1):
            target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
            async with self._pool.stream("GET", target, headers=HEADERS, extensions=self._timeouts) as response:
                headers = {name.lower(): value for name, value in response.headers}
                if response.status not in REDIRECTS:
                    return await _content(response, headers, max_bytes)
                location = headers.get(b"location", b"").decode("latin-1")
            try:
                url = self._rules.check(url.join(location))
            except (httpx.InvalidURL, ValueError) as error:
                raise RefusedUrlError("could not be fetched: it redirects to no valid URL") from error
        raise RefusedUrlError(f"could not be fetched: there are more than {MAX_REDIRECTS} redirects")

    @property
    def _timeouts(self) -> dict[str, dict[str, float]]:
        return {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._rules.timeout_s)}


async def _content(response: httpcore.Response, headers: dict[bytes, bytes], max_bytes: int) -> bytes:
    if response.status != httpx.codes.OK:
        raise RefusedUrlError(f"could not be fetched: its host answers {response.status}")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RefusedUrlError("could not be fetched: its host sends it compressed, which was not asked for")
    announced = headers.get(b"content-length", b"0")
    too_large = RefusedUrlError(f"is larger than {max_bytes} bytes")
    if announced.isdigit() and int(announced[:20]) > max_bytes:
        raise too_large
    content = bytearray()
    async for chunk in response.aiter_stream():
        content += chunk
        if len(content) > max_bytes:
            raise too_large
    return bytes(content)
