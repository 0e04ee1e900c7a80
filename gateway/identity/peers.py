"""The peer of a request's connection: a trusted proxy, a person at this machine, or someone else.

A TCP connection over loopback alone does not show that a request comes directly from a person at this machine: reverse
proxies, tunnels and sidecars on the same host connect over loopback on behalf of strangers, and a web page whose host
name an attacker resolves to 127.0.0.1 (DNS rebinding) connects from the browser of the person who opened it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from common.errors import ConfigurationError, InvalidRequestError, PermissionDeniedError
from common.names import check_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.datastructures import Headers

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
# Headers that proxies add and direct clients do not send. A single one shows that a proxy forwarded the request.
FORWARDING_HEADERS = frozenset(
    {
        "forwarded",  # RFC 7239
        "via",  # RFC 9110, 7.6.3
        "cdn-loop",  # RFC 8586
        "client-ip",
        "true-client-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-forwarded",
        "x-original-host",
        "x-original-uri",
        "x-real-ip",
        "x-scheme",
    }
)
FORWARDING_PREFIXES = (
    "cf-",  # Cloudflare, whose tunnels end on the served host
    "fastly-",
    "fly-",
    "l5d-",  # Linkerd
    "tailscale-",
    "x-amzn-",
    "x-arr-",  # IIS
    "x-auth-request-",  # oauth2-proxy
    "x-envoy-",  # Envoy, Istio
    "x-forwarded-",
    "x-original-forwarded-",
)
# By default nginx speaks HTTP/1.0 to its upstream servers, and sends their address as Host.
PROXY_HTTP_VERSION = "1.0"
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(?::\d{1,5})?")
REFUSED_HOST = (
    "Without an API key, this request is answered only for localhost, IP addresses and the names in "
    "gateway.allowed_hosts, not for {host}."
)


@dataclass(frozen=True, slots=True)
class TrustedProxy:
    """Direct peers in `networks` may name tenant and user in these headers."""

    networks: tuple[Network, ...]
    tenant_header: str
    user_header: str

    def trusts(self, peer: str | None) -> bool:
        """Whether the TCP peer `peer` is a configured proxy."""
        address = parse_peer(peer)
        return address is not None and any(address in network for network in self.networks)

    def names(self, headers: Headers, peer: str | None) -> tuple[str | None, str | None]:
        """Return the tenant and user that the proxy names; (None, None) if the peer is not a trusted proxy.

        Raises:
            InvalidRequestError: a header is malformed.
        """
        if not self.trusts(peer):
            return None, None
        return _single_header(headers, self.tenant_header), _single_header(headers, self.user_header)


# Requests often come from the same addresses.
@lru_cache(maxsize=1024)
def parse_peer(peer: str | None) -> Address | None:
    """Return the IP address of a TCP peer, None if it has none; IPv4-mapped IPv6 addresses become IPv4."""
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(peer: str | None) -> bool:
    """Whether the TCP peer `peer` has a loopback address."""
    address = parse_peer(peer)
    return address is not None and address.is_loopback


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse networks in CIDR notation.

    Raises:
        ConfigurationError: one is malformed.
    """
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigurationError(f"gateway.trusted_proxies: {error}") from error


def _single_header(headers: Headers, name: str) -> str | None:
    """Return the header's value; two are refused, since a client could add its own before a proxy that appends."""
    values = headers.getlist(name)
    if not values or values == [""]:
        return None
    if len(values) > 1:
        raise InvalidRequestError(f"The header {name} must occur only once.", param=name)
    return check_name(name, values[0])


@dataclass(frozen=True, slots=True)
class Locality:
    """Decides which requests without a credential are local. Names in `allowed_hosts` are in lower case."""

    proxy: TrustedProxy
    allowed_hosts: frozenset[str] = frozenset()

    def is_local_person(self, peer: str | None, headers: Headers, http_version: str = "1.1") -> bool:
        """Return whether a person at this machine sent this request, over a direct connection to a loopback address.

        The Host must be `localhost` or a loopback address. A name in `allowed_hosts` is not sufficient: a proxy that
        adds no header of its own can only be recognised by the name that it forwards.
        """
        return (
            is_loopback(peer)
            and not self.proxy.trusts(peer)
            and http_version != PROXY_HTTP_VERSION
            and _is_loopback_host(_host(headers))
            and not self._is_forwarded(headers)
        )

    def may_administrate(self, peer: str | None, headers: Headers, http_version: str = "1.1") -> bool:
        """Return whether a local person sent this request, and not a web page of another origin."""
        return self.is_local_person(peer, headers, http_version) and not is_foreign_page(headers)

    def check_host(self, peer: str | None, headers: Headers, *, all_are_local: bool = False) -> None:
        """Refuse a request whose Host is not a name of this server, as after DNS rebinding.

        Checks requests over loopback only, unless `all_are_local`: requests from elsewhere then count as the local
        person's, too. IP addresses are accepted, since they cannot be rebound. Trusted proxies are not checked: they
        have their own names.

        Raises:
            PermissionDeniedError: the name is not allowed.
        """
        if self.proxy.trusts(peer) or not (all_are_local or is_loopback(peer)):
            return
        host = _host(headers)
        if host is None or not (host == "localhost" or parse_peer(host) or host in self.allowed_hosts):
            raise PermissionDeniedError(REFUSED_HOST.format(host=repr((host or headers.get("host", ""))[:100])))

    def _is_forwarded(self, headers: Headers) -> bool:
        if self.proxy.tenant_header in headers or self.proxy.user_header in headers:
            return True
        return any(name in FORWARDING_HEADERS or name.startswith(FORWARDING_PREFIXES) for name in headers)


def is_foreign_page(headers: Headers) -> bool:
    """Return whether the browser's headers show that a page of another origin sent the request."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def _host(headers: Headers) -> str | None:
    """Return the request's host without port and brackets; None unless there is exactly one Host header."""
    values = headers.getlist("host")
    return _parse_host(values[0]) if len(values) == 1 else None


@lru_cache(maxsize=1024)
def _parse_host(value: str) -> str | None:
    match = HOST.fullmatch(value.lower())
    return match[1].strip("[]") if match else None


def _is_loopback_host(host: str | None) -> bool:
    return host == "localhost" or is_loopback(host)
