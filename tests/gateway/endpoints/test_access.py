"""Who may call what: every route of the application is open, takes a credential, or takes an administrator's."""

from __future__ import annotations

from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.gateway.support import FakedGateway, error_of, gateway_saying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx
    from starlette.routing import BaseRoute


class Access(Enum):
    OPEN = auto()
    CREDENTIAL = auto()
    ADMIN = auto()


# What a new endpoint takes must be said here.
ACCESS = {
    "GET /health": Access.OPEN,
    "GET /ready": Access.OPEN,
    "GET /health_generate": Access.OPEN,
    # The console's page and scripts hold no data.
    "GET /console": Access.OPEN,
    "GET /console/": Access.OPEN,
    "GET /console/static/{name:path}": Access.OPEN,
    "GET /console/about": Access.CREDENTIAL,
    "GET /console/fleet": Access.ADMIN,
    "GET /console/grove": Access.ADMIN,
    "GET /metrics": Access.ADMIN,
    "GET /flush_cache": Access.ADMIN,
    "POST /flush_cache": Access.ADMIN,
    "POST /update_weights_from_disk": Access.ADMIN,
    "POST /sleep": Access.ADMIN,
    "POST /wake_up": Access.ADMIN,
    "GET /is_sleeping": Access.ADMIN,
    "GET /get_server_info": Access.ADMIN,
    "GET /server_info": Access.ADMIN,
    "POST /v1/load_lora_adapter": Access.ADMIN,
    "POST /load_lora_adapter": Access.ADMIN,
    "POST /v1/unload_lora_adapter": Access.ADMIN,
    "POST /unload_lora_adapter": Access.ADMIN,
    "GET /v1/lora_adapters": Access.ADMIN,
    "GET /openapi.json": Access.CREDENTIAL,
    "GET /get_model_info": Access.CREDENTIAL,
    "GET /model_info": Access.CREDENTIAL,
    # Of others' requests, and of all, only administrators: see test_native.py.
    "POST /abort_request": Access.CREDENTIAL,
    # Of others' requests only administrators: see test_timelines.py.
    "GET /v1/requests/{request_id}/timeline": Access.CREDENTIAL,
    "POST /v1/chat/completions": Access.CREDENTIAL,
    "GET /v1/chat/completions": Access.CREDENTIAL,
    "POST /v1/completions": Access.CREDENTIAL,
    "GET /v1/completions": Access.CREDENTIAL,
    "POST /v1/responses": Access.CREDENTIAL,
    "GET /v1/responses": Access.CREDENTIAL,
    "POST /v1/responses/{response_id}/cancel": Access.CREDENTIAL,
    "GET /v1/responses/{response_id}": Access.CREDENTIAL,
    "DELETE /v1/responses/{response_id}": Access.CREDENTIAL,
    "GET /v1/responses/{response_id}/input_items": Access.CREDENTIAL,
    "POST /v1/messages": Access.CREDENTIAL,
    "GET /v1/messages": Access.CREDENTIAL,
    "POST /v1/messages/count_tokens": Access.CREDENTIAL,
    "POST /v1/embeddings": Access.CREDENTIAL,
    "POST /v2/embed": Access.CREDENTIAL,
    "POST /embed": Access.CREDENTIAL,
    "POST /predict": Access.CREDENTIAL,
    "GET /info": Access.CREDENTIAL,
    "POST /v1/classify": Access.CREDENTIAL,
    "POST /classify": Access.CREDENTIAL,
    "POST /v1/pooling": Access.CREDENTIAL,
    "POST /pooling": Access.CREDENTIAL,
    "POST /v1/score": Access.CREDENTIAL,
    "POST /score": Access.CREDENTIAL,
    "POST /v1/rerank": Access.CREDENTIAL,
    "POST /v2/rerank": Access.CREDENTIAL,
    "POST /rerank": Access.CREDENTIAL,
    "POST /generate": Access.CREDENTIAL,
    "POST /open_session": Access.CREDENTIAL,
    "POST /close_session": Access.CREDENTIAL,
    "POST /v1/files": Access.CREDENTIAL,
    "GET /v1/files": Access.CREDENTIAL,
    "GET /v1/files/{file_id}": Access.CREDENTIAL,
    "GET /v1/files/{file_id}/content": Access.CREDENTIAL,
    "DELETE /v1/files/{file_id}": Access.CREDENTIAL,
    "POST /v1/batches": Access.CREDENTIAL,
    "GET /v1/batches": Access.CREDENTIAL,
    "GET /v1/batches/{batch_id}": Access.CREDENTIAL,
    "POST /v1/batches/{batch_id}/cancel": Access.CREDENTIAL,
    "POST /tokenize": Access.CREDENTIAL,
    "POST /detokenize": Access.CREDENTIAL,
    "GET /v1/usage": Access.CREDENTIAL,
    "GET /v1/organization/usage/completions": Access.CREDENTIAL,
    "GET /v1/organization/usage/embeddings": Access.CREDENTIAL,
    "GET /v1/models": Access.CREDENTIAL,
    "GET /v1/models/{name:path}": Access.CREDENTIAL,
}
REFUSED = (401, 403)


def of_every_endpoint(test: Callable[..., object]) -> Callable[..., object]:
    """Run for each endpoint, in the event loop that the module's gateways share."""
    in_one_loop: Callable[..., object] = pytest.mark.asyncio(loop_scope="module")(test)
    parametrized: Callable[..., object] = pytest.mark.parametrize("endpoint", ACCESS)(in_one_loop)
    return parametrized


LOCALLY = {"host": "localhost:8000"}
# Keyless callers over loopback that are not a person at this machine, but are answered.
NOT_LOCAL = {
    "reverse proxy": LOCALLY | {"x-forwarded-for": "203.0.113.9"},
    "nginx's other header": LOCALLY | {"x-real-ip": "203.0.113.9"},
    "proxy without a configured address": LOCALLY | {"x-pando-user": "ann"},
    "proxy that passes only the name on": {"host": "llm.example"},
    "page of another origin": LOCALLY | {"origin": "https://evil.example"},
    "image on a page of another origin": LOCALLY | {"sec-fetch-site": "cross-site"},
}


def endpoints(routes: list[BaseRoute]) -> Iterator[str]:
    for route in routes:
        for method in getattr(route, "methods", None) or ("ANY",):
            if method != "HEAD":
                yield f"{method} {getattr(route, 'path', route)}"


def test_every_route_is_in_the_table() -> None:
    found = list(endpoints(gateway_saying("x").app.routes))
    assert len(found) == len(set(found))
    assert set(found) == ACCESS.keys()


async def ask(gateway: FakedGateway, endpoint: str, headers: dict[str, str]) -> httpx.Response:
    method, _, path = endpoint.partition(" ")
    path = path.replace("static/{name:path}", "static/main.js")
    path = path.replace("{response_id}", "resp_1").replace("{name:path}", "tiny")
    async with gateway.client() as client:
        return await client.request(method, path, headers=headers, json={} if method == "POST" else None)


@cache
def gateway_with(**settings: Any) -> FakedGateway:
    """Return the one gateway with these settings: making its application takes longer than all that is asked of it."""
    return gateway_saying("x", **settings)


def keyless(peer: str = "127.0.0.1", **settings: Any) -> FakedGateway:
    gateway = gateway_with(**settings)
    gateway.peer = peer
    gateway.administration.flushes = 0
    return gateway


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("access") / "keys.toml"
    save_keys(path, [ApiKey(name, hash_of(name), "acme", admin=name == "root") for name in ("ann", "root")])
    return path


@pytest.fixture
def guarded(keys_file: Path) -> FakedGateway:
    return keyless(keys_file=keys_file)


@of_every_endpoint
async def test_with_keys_a_local_connection_grants_nothing(guarded: FakedGateway, endpoint: str) -> None:
    access = ACCESS[endpoint]
    response = await ask(guarded, endpoint, LOCALLY)
    assert response.status_code == (200 if access is Access.OPEN else 401)
    wrong = await ask(guarded, endpoint, LOCALLY | {"authorization": "Bearer wrong"})
    assert wrong.status_code == (200 if access is Access.OPEN else 401)


@of_every_endpoint
async def test_with_keys_an_ordinary_key_allows_all_but_administration(guarded: FakedGateway, endpoint: str) -> None:
    response = await ask(guarded, endpoint, LOCALLY | {"authorization": "Bearer ann"})
    assert (response.status_code == 403) == (ACCESS[endpoint] is Access.ADMIN)
    assert response.status_code != 401
    assert guarded.administration.flushes == 0


@of_every_endpoint
async def test_with_keys_an_admin_key_allows_everything_from_everywhere(guarded: FakedGateway, endpoint: str) -> None:
    guarded.peer = "10.1.2.3"
    headers = {"host": "llm.example", "x-forwarded-for": "203.0.113.9", "authorization": "Bearer root"}
    assert (await ask(guarded, endpoint, headers)).status_code not in REFUSED


@of_every_endpoint
@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_without_keys_a_local_person_may_do_everything(endpoint: str, peer: str) -> None:
    assert (await ask(keyless(peer), endpoint, LOCALLY)).status_code not in REFUSED


@of_every_endpoint
@pytest.mark.parametrize("who", NOT_LOCAL)
async def test_without_keys_callers_that_are_not_local_persons_cannot_administer_over_loopback(
    endpoint: str, who: str
) -> None:
    gateway = keyless(allowed_hosts=("llm.example",))
    response = await ask(gateway, endpoint, NOT_LOCAL[who])
    assert (response.status_code == 403) == (ACCESS[endpoint] is Access.ADMIN)
    assert gateway.administration.flushes == 0


@of_every_endpoint
async def test_without_keys_users_of_a_trusted_proxy_cannot_administer(endpoint: str) -> None:
    gateway = keyless(trusted_proxies=("127.0.0.1/32",))
    for headers in ({"host": "llm.example", "x-pando-user": "ann"}, LOCALLY, LOCALLY | {"x-pando-tenant": "acme"}):
        response = await ask(gateway, endpoint, headers)
        assert (response.status_code == 403) == (ACCESS[endpoint] is Access.ADMIN)


@of_every_endpoint
async def test_without_keys_remote_callers_cannot_administer(endpoint: str) -> None:
    gateway = keyless("10.1.2.3")
    for headers in (LOCALLY, {"host": "pando-gateway.llm.svc"}):
        response = await ask(gateway, endpoint, headers)
        assert (response.status_code == 403) == (ACCESS[endpoint] is Access.ADMIN)


@of_every_endpoint
async def test_a_rebound_name_reaches_nothing_but_health(endpoint: str) -> None:
    response = await ask(keyless(), endpoint, {"host": "evil.example:8000"})
    if ACCESS[endpoint] is Access.OPEN:
        assert response.status_code == 200
    else:
        assert "gateway.allowed_hosts" in error_of(response, 403)["message"]


async def test_open_endpoints_and_the_description_show_nothing_of_tenants(guarded: FakedGateway) -> None:
    guarded.metrics.refuse("acme", "limit")
    shown = [await ask(guarded, endpoint, {}) for endpoint in ACCESS if ACCESS[endpoint] is Access.OPEN]
    shown.append(await ask(guarded, "GET /openapi.json", {"authorization": "Bearer ann"}))
    assert [response.status_code for response in shown] == [200] * 7
    assert not any("acme" in response.text for response in shown)
    # An administrator sees that tenant where it is counted, so the check above would notice.
    assert "acme" in (await ask(guarded, "GET /metrics", {"authorization": "Bearer root"})).text
