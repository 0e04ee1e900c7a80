"""Addresses to which the gateway may connect for a client: those of the public Internet."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Final

# Of IPv6, only the space of global unicast addresses is used at all, which leaves out mapped IPv4 addresses
# (::ffff:0:0/96), NAT64 (64:ff9b::/96 and 64:ff9b:1::/48), local ones (fc00::/7, fe80::/10) and multicast.
GLOBAL_UNICAST: Final = ip_network("2000::/3")
# What `is_global` of some Python versions lets through, and what leads to other networks.
OTHERS: Final = tuple(
    map(
        ip_network,
        (
            "100.64.0.0/10",  # carriers' private networks
            "168.63.129.16/32",  # Azure's host
            "192.0.0.0/24",  # protocol assignments
            "192.88.99.0/24",  # relays of 6to4
            "198.18.0.0/15",  # benchmarks
            "2001::/23",  # protocol assignments, Teredo among them
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4, which contains any IPv4 address
            "3fff::/20",  # documentation
        ),
    )
)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether `address` is an ordinary one of the public Internet."""
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    if address.version == GLOBAL_UNICAST.version and address not in GLOBAL_UNICAST:
        return False
    return not any(address in network for network in OTHERS if network.version == address.version)
