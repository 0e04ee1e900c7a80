"""Proxies that authenticate users themselves and name them in headers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from common.errors import ConfigurationError, InvalidRequestError
from common.names import check_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.datastructures import Headers

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


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
