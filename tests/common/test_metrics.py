from __future__ import annotations

import socket

import httpx
import pytest

from common.errors import ConfigurationError
from common.metrics import start_metrics_server


def test_a_free_port_is_taken_and_returned() -> None:
    port = start_metrics_server(0, "127.0.0.1")
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    assert "# HELP pando_rpc_seconds" in text


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"metrics_port: cannot listen on 127\.0\.0\.1:{port}"):
            start_metrics_server(port, "127.0.0.1")
