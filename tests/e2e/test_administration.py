"""Who administers a deployment, shown with the gateway's own process and each kind of caller."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import httpx
import pytest

from common.settings import GatewaySettings, ModelSettings, Settings
from deploy.supervisor.layout import free_port
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.e2e.conftest import serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

ADMIN = ("GET /metrics", "POST /flush_cache", "GET /flush_cache", "GET /get_server_info", "GET /server_info")
USER = ("GET /openapi.json", "GET /v1/models", "GET /get_model_info", "POST /abort_request")
OPEN = ("GET /health", "GET /ready", "GET /health_generate")
ABORT = {"rid": "none"}


@pytest.fixture(scope="module")
def keyless(run_root: Path) -> Iterator[Served]:
    gateway = GatewaySettings(
        host="0.0.0.0", port=0, metrics_port=free_port("127.0.0.1"), allowed_hosts=("llm.example",)
    )
    yield from serve(Settings(model=ModelSettings(load_format="fake"), gateway=gateway), run_root)


@pytest.fixture(scope="module")
def guarded(run_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("administration") / "keys.toml"
    save_keys(path, [ApiKey(name, hash_of(name), "acme", admin=name == "root") for name in ("ann", "root")])
    gateway = GatewaySettings(port=0, keys_file=path, metrics_port=free_port("127.0.0.1"))
    yield from serve(Settings(model=ModelSettings(load_format="fake"), gateway=gateway), run_root)


def statuses(url: str, endpoints: tuple[str, ...], **headers: str) -> list[int]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60, headers=headers) as http:
        return [http.request(*each.split(), json=ABORT if "POST" in each else None).status_code for each in endpoints]


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


def own_address() -> str:
    """Return an address of this machine that is not loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def test_a_local_person_may_administer(keyless: Served) -> None:
    for host in ("127.0.0.1", "localhost"):
        url = f"http://{host}:{port_of(keyless)}"
        assert statuses(url, (*ADMIN, *USER, *OPEN)) == [200] * 12


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "203.0.113.9"},
        {"forwarded": "for=203.0.113.9"},
        {"host": "llm.example"},
        {"origin": "https://evil.example"},
    ],
)
def test_a_local_proxy_and_a_foreign_page_may_not_administer(keyless: Served, headers: dict[str, str]) -> None:
    assert statuses(keyless.url, ADMIN, **headers) == [403] * 5
    assert statuses(keyless.url, (*USER, *OPEN), **headers) == [200] * 7


def test_nginx_with_default_settings_may_not_administer(keyless: Served) -> None:
    # `proxy_pass http://127.0.0.1:PORT;` and nothing else: HTTP/1.0, the server's own address as Host, no header more.
    host = f"127.0.0.1:{port_of(keyless)}"
    with socket.create_connection(("127.0.0.1", port_of(keyless)), timeout=60) as proxy:
        proxy.sendall(f"GET /metrics HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        with proxy.makefile("rb") as answer:
            assert b" 403 " in answer.readline()


def test_refusing_a_rebound_host_name_names_the_setting_that_allows_it(keyless: Served) -> None:
    assert statuses(keyless.url, (*ADMIN, *USER), host="evil.example") == [403] * 9
    assert statuses(keyless.url, OPEN, host="evil.example") == [200] * 3
    answer = httpx.get(f"{keyless.url}/v1/models", headers={"host": "evil.example"}, timeout=60, trust_env=False)
    assert "gateway.allowed_hosts" in answer.json()["error"]["message"]


def test_another_machine_may_not_administer_whatever_its_host_header(keyless: Served) -> None:
    url = f"http://{own_address()}:{port_of(keyless)}"
    for headers in ({}, {"host": "localhost"}, {"host": "pando-gateway.llm.svc"}):
        assert statuses(url, ADMIN, **headers) == [403] * 5
        assert statuses(url, (*USER, *OPEN), **headers) == [200] * 7


def test_with_keys_only_an_admin_key_administers(guarded: Served) -> None:
    assert statuses(guarded.url, (*ADMIN, *USER)) == [401] * 9
    assert statuses(guarded.url, ADMIN, authorization="Bearer ann") == [403] * 5
    assert statuses(guarded.url, USER, authorization="Bearer ann") == [200] * 4
    proxied = {"authorization": "Bearer root", "x-forwarded-for": "203.0.113.9", "host": "llm.example"}
    assert statuses(guarded.url, (*ADMIN, *USER), **proxied) == [200] * 9
    assert statuses(guarded.url, OPEN) == [200] * 3


def test_prometheus_reads_the_metrics_port_without_a_key(guarded: Served) -> None:
    assert statuses(guarded.url, ADMIN[:1], authorization="Bearer ann") == [403]
    port = guarded.deployment.layout.find("gateway").settings.gateway.metrics_port
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60, trust_env=False).text
    assert 'pando_gateway_refusals_total{cause="permission_denied",tenant="acme"}' in text
    # It is at the gateway's interface, here loopback, and nowhere else.
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own_address(), port), timeout=60).close()
