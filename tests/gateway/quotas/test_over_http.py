"""Limits as clients meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import CacheMode
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.ring import says
from tests.gateway.support import HELLO, FakedGateway, error_of, faked

if TYPE_CHECKING:
    from pathlib import Path

    import httpx


def gateway_with(tmp_path: Path, limits: str, *keys: ApiKey) -> FakedGateway:
    (tmp_path / "limits.toml").write_text(limits)
    save_keys(tmp_path / "keys.toml", keys or [ApiKey("k1", hash_of("one"), "acme")])
    return faked(says("x"), keys_file=tmp_path / "keys.toml", limits_file=tmp_path / "limits.toml")


async def ask(gateway: FakedGateway, key: str = "one", **fields: object) -> httpx.Response:
    body = {"model": "tiny", "messages": HELLO, **fields}
    return await gateway.post("/v1/chat/completions", body, {"authorization": f"Bearer {key}"})


async def test_the_limit_is_told_before_it_is_reached_and_then_429_with_retry_after(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "[default]\nrequests_per_minute = 2\n")
    first = await ask(gateway)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await ask(gateway, stream=True)).headers["x-ratelimit-remaining-requests"] == "0"
    refused = await ask(gateway)
    assert error_of(refused, 429)["type"] == "rate_limit_error"
    assert 'pando_gateway_refusals_total{cause="limit",tenant="acme"} 1.0' in gateway.metrics.exposition().decode()
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(gateway.ring.submitted) == 2


async def test_quota_checked_before_the_user_was_known(tmp_path: Path) -> None:
    key = ApiKey("k1", hash_of("one"), "acme", vouches_for_users=True)
    gateway = gateway_with(tmp_path, "[default.each_user]\nrequests_per_minute = 1\n", key)
    assert (await ask(gateway, user="ann")).status_code == 200
    assert (await ask(gateway, user="bob")).status_code == 200
    assert (await ask(gateway, user="ann")).status_code == 429


async def test_admin_role_dropped_the_quota(tmp_path: Path) -> None:
    key = ApiKey("k1", hash_of("one"), "acme", admin=True)
    gateway = gateway_with(tmp_path, "[default]\nrequests_per_minute = 1\n", key)
    assert [(await ask(gateway)).status_code for _ in range(2)] == [200, 429]


async def test_requests_that_fail_give_their_place_back(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "[default]\nconcurrent = 1\n")
    gateway.generations.draining = True
    assert (await ask(gateway)).status_code == 503
    gateway.generations.draining = False
    assert (await ask(gateway)).status_code == 200
    assert (await ask(gateway)).status_code == 200


async def test_context_limit_and_cache_mode_of_the_credential_reach_the_ring(tmp_path: Path) -> None:
    key = ApiKey("k1", hash_of("one"), "acme", cache=CacheMode.NONE)
    gateway = gateway_with(tmp_path, "[tenants.acme]\nmax_context = 100\n", key)
    await ask(gateway, cache_mode="default")
    [request] = gateway.ring.submitted
    assert request.max_context_tokens == 100
    assert request.cache_mode is CacheMode.NONE
