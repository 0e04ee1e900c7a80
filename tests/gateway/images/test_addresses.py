"""Only ordinary addresses of the public Internet count as public."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.images.addresses import is_public
from tests.examples import examples

PRIVATE = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.1 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.2.3
240.0.0.1 255.255.255.255
:: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::1 100::1 2001::1
2001:0:5ef5:79fb::1 2001:db8::1 2002:7f00:1::1 2002:808:808::1 3fff::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0
fec0::1 ff02::1 4000::1
"""
PUBLIC = "1.1.1.1 8.8.8.8 93.184.216.34 172.32.0.1 192.0.1.1 2606:4700:4700::1111 2a00:1450:4001:81b::200e"


@pytest.mark.parametrize("text", PRIVATE.split())
def test_addresses_that_lead_elsewhere_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize("text", PUBLIC.split())
def test_ordinary_addresses_are_public(text: str) -> None:
    assert is_public(ip_address(text))


@examples(300)
@given(st.ip_addresses(v=4))
def test_no_ipv6_notation_of_an_ipv4_address_is_public(address: IPv4Address) -> None:
    number = int(address)
    for network in (0, 0xFFFF << 32, 0x64FF9B << 96, (0x64FF9B0001) << 80, 0x2002 << 112 | number << 80):
        assert not is_public(IPv6Address(network | number))


@examples(300)
@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public(address: IPv4Address | IPv6Address) -> None:
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast:
        assert not is_public(address)
