from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from services.worker.engine.parallel.group import interface_to, use_way_to


def test_this_host_is_reached_by_no_interface_to_name() -> None:
    assert interface_to("127.0.0.1") is None
    assert interface_to("localhost") is None
    assert interface_to("no-such-host.invalid") is None


@pytest.fixture
def other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that packets leave by eth7."""

    class Probe:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: tuple[str, int]) -> None:
            assert address[0] == "10.77.0.2"

        def getsockname(self) -> tuple[str, int]:
            return "10.77.0.3", 40000

    addresses = {
        "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
        "eth7": [
            SimpleNamespace(family=psutil.AF_LINK, address="aa:bb:cc:dd:ee:ff"),
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1%eth7"),
            SimpleNamespace(family=socket.AF_INET, address="10.77.0.3"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(socket, "socket", Probe)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # Set first, so that it is put back afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("other_host")
def test_another_host_is_reached_by_the_interface_with_our_address() -> None:
    use_way_to("10.77.0.2:29500")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.usefixtures("other_host")
def test_interfaces_named_in_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_way_to("10.77.0.2:29500")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "ib0")
