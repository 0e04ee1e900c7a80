"""Which network interface ranks on several hosts talk over."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket

import psutil

log = logging.getLogger(__name__)

# The variables in which gloo and NCCL expect the interface.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def use_way_to(rendezvous: str) -> None:
    """Have ranks talk over the interface that leads to `rendezvous` (host:port), unless the environment names another.

    Left alone, gloo takes the one that the host's own name stands for, which may be the loopback, and NCCL the first.
    """
    name = interface_to(rendezvous.rpartition(":")[0].strip("[]"))
    if name is None:
        return
    for variable in _VARIABLES:
        os.environ.setdefault(variable, name)
    log.info("ranks.interface name=%s", os.environ[_VARIABLES[0]])


def interface_to(host: str) -> str | None:
    """Return the interface that packets to `host` leave by; None if that is this host's loopback, or not known."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Sends nothing: it only looks the route up.
            probe.connect(address)
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    if own.is_loopback:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            is_ip = each.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and ipaddress.ip_address(each.address.partition("%")[0]) == own:
                return name
    return None
