from __future__ import annotations

import socket

import httpx
import pytest

from common.errors import ConfigurationError
from common.metrics import start_metrics_server
from common.settings import Settings


def test_a_free_port_is_taken_and_returned() -> None:
    port = start_metrics_server(0, "127.0.0.1")
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60, trust_env=False).text
    assert "# HELP pando_rpc_seconds" in text


def test_metrics_are_served_on_loopback_only_by_default() -> None:
    port = start_metrics_server(0, Settings().metrics.host)
    assert httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60, trust_env=False).status_code == httpx.codes.OK
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.2:{port}/metrics", timeout=60, trust_env=False)


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"metrics_port: cannot listen on 127\.0\.0\.1:{port}"):
            start_metrics_server(port, "127.0.0.1")
