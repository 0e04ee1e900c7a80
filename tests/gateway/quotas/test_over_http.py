"""Limits as clients meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.errors import ContextLengthError
from common.types import CacheMode, Subject
from gateway.identity.keys import ApiKey, hash_of, save_keys
from gateway.quotas.quotas import Charge
from tests.fakes.pipeline import says
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


async def test_headers_show_the_limit_and_exceeding_it_gives_429_with_retry_after(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "[default]\nrequests_per_minute = 2\n")
    first = await ask(gateway)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await ask(gateway, stream=True)).headers["x-ratelimit-remaining-requests"] == "0"
    refused = await ask(gateway)
    assert error_of(refused, 429)["type"] == "rate_limit_error"
    assert 'pando_gateway_refusals_total{cause="limit",tenant="acme"} 1.0' in gateway.metrics.exposition()[0].decode()
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(gateway.pipeline.submitted) == 2


async def test_quotas_are_checked_per_vouched_user(tmp_path: Path) -> None:
    key = ApiKey("k1", hash_of("one"), "acme", vouches_for_users=True)
    gateway = gateway_with(tmp_path, "[default.each_user]\nrequests_per_minute = 1\n", key)
    assert (await ask(gateway, user="ann")).status_code == 200
    assert (await ask(gateway, user="bob")).status_code == 200
    assert (await ask(gateway, user="ann")).status_code == 429


async def test_an_admin_key_is_subject_to_quotas(tmp_path: Path) -> None:
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


async def test_context_limit_and_cache_mode_of_the_credential_reach_the_pipeline(tmp_path: Path) -> None:
    key = ApiKey("k1", hash_of("one"), "acme", cache=CacheMode.NONE)
    gateway = gateway_with(tmp_path, "[tenants.acme]\nmax_context = 100\n", key)
    await ask(gateway, cache_mode="default")
    [request] = gateway.pipeline.submitted
    assert request.options.max_context_tokens == 100
    assert request.options.cache_mode is CacheMode.NONE


# Requests beside generation that cost something, and how many tokens each counts: a character is one to the fake.
CHARGED = {
    "/tokenize": ({"prompt": "hello", "add_special_tokens": False}, 5),
    "/detokenize": ({"tokens": [104, 105, 106]}, 3),
    "/v1/messages/count_tokens": ({"model": "tiny", "messages": HELLO}, len("<user>Hello")),
    "/open_session": ({"model": "tiny"}, 0),
    "/close_session": ({"model": "tiny", "session_id": "none"}, 0),
    "/abort_request": ({"rid": "none"}, 0),
    "GET /v1/responses/none": ({}, 0),
    "GET /v1/responses/none/input_items": ({}, 0),
    "DELETE /v1/responses/none": ({}, 0),
}
charged = pytest.mark.parametrize("endpoint", CHARGED)
ENDS_OTHERS = ("/close_session", "/abort_request", "DELETE /v1/responses/none")


async def call(gateway: FakedGateway, endpoint: str, key: str = "one") -> httpx.Response:
    method, _, path = endpoint.rpartition(" ")
    body = CHARGED[endpoint][0]
    headers = {"authorization": f"Bearer {key}"}
    async with gateway.client() as client:
        return await client.request(method or "POST", path, headers=headers, json=body or None)


@charged
async def test_requests_that_generate_nothing_count_and_so_do_their_tokens(tmp_path: Path, endpoint: str) -> None:
    gateway = gateway_with(tmp_path, "[default]\nrequests_per_minute = 3\ntokens_per_minute = 1000\n")
    answers = [await call(gateway, endpoint) for _ in range(4)]
    assert [answer.status_code == 429 for answer in answers] == [False, False, False, True]
    left = [int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in answers]
    # The budget refills by 16 tokens a second while this runs.
    assert abs(1000 - left[3] - 3 * CHARGED[endpoint][1]) <= 15
    assert (await ask(gateway)).status_code == 429


@charged
async def test_requests_that_generate_nothing_count_for_their_own_tenant_only(tmp_path: Path, endpoint: str) -> None:
    keys = [ApiKey("k1", hash_of("one"), "acme"), ApiKey("k2", hash_of("two"), "rival")]
    gateway = gateway_with(tmp_path, "[default]\nrequests_per_minute = 1\n", *keys)
    assert [(await call(gateway, endpoint)).status_code == 429 for _ in range(2)] == [False, True]
    assert (await call(gateway, endpoint, "two")).status_code != 429


@charged
async def test_only_requests_that_end_something_pass_where_too_many_are_open(tmp_path: Path, endpoint: str) -> None:
    gateway = gateway_with(tmp_path, "[default]\nconcurrent = 1\n")
    subject = Subject("acme", "key/k1")
    lease = await gateway.context.quotas.take(Charge(subject, 1, 0))
    assert ((await call(gateway, endpoint)).status_code == 429) == (endpoint not in ENDS_OTHERS)
    lease.settle(0)
    for _ in range(2):
        assert (await call(gateway, endpoint)).status_code != 429


async def test_a_text_that_announces_more_tokens_than_are_left_is_not_encoded(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "[default]\ntokens_per_minute = 1000\n")
    body = {"prompt": "x" * 3_600}
    headers = {"authorization": "Bearer one"}
    assert (await gateway.post("/tokenize", body, headers)).status_code == 200
    assert error_of(await gateway.post("/tokenize", body, headers), 429)["type"] == "rate_limit_error"
    assert gateway.model.subjects == [Subject("acme", "key/k1")]


async def test_a_text_that_cannot_be_encoded_is_charged_its_announced_cost(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "[default]\ntokens_per_minute = 1000\n")
    gateway.model.error = ContextLengthError("too long", param="text")
    headers = {"authorization": "Bearer one"}
    assert (await gateway.post("/tokenize", {"prompt": "x" * 3_600}, headers)).status_code == 400
    assert (await gateway.post("/tokenize", {"prompt": "x" * 3_600}, headers)).status_code == 429


async def test_echoing_prompt_ids_is_charged_for_their_decoding(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "[default]\nrequests_per_minute = 3\n")
    body = {"model": "tiny", "max_tokens": 1, "echo": True}
    headers = {"authorization": "Bearer one"}
    for prompt, left in (("hi", "2"), ([104, 105], "0")):
        answer = await gateway.post("/v1/completions", {**body, "prompt": prompt}, headers)
        assert answer.headers.get_list("x-ratelimit-remaining-requests")[-1] == left
    refused = await gateway.post("/v1/completions", {**body, "prompt": [104, 105]}, headers)
    assert refused.status_code == 429
    assert gateway.model.subjects == [Subject("acme", "key/k1")]


async def test_token_counting_is_limited_per_vouched_user(tmp_path: Path) -> None:
    key = ApiKey("k1", hash_of("one"), "acme", vouches_for_users=True)
    gateway = gateway_with(tmp_path, "[default.each_subject]\nrequests_per_minute = 1\n", key)
    for user, expected in (("ann", 200), ("bob", 200), ("ann", 429)):
        body = {"model": "tiny", "messages": HELLO, "metadata": {"user_id": user}}
        answer = await gateway.post("/v1/messages/count_tokens", body, {"authorization": "Bearer one"})
        assert answer.status_code == expected
    assert gateway.model.subjects == [Subject("acme", "user/ann"), Subject("acme", "user/bob")]


async def test_a_tenant_that_shares_nothing_shows_no_subject_the_use_of_another(tmp_path: Path) -> None:
    keys = [ApiKey("k1", hash_of("one"), "acme"), ApiKey("k2", hash_of("two"), "acme")]
    limits = 'tokens_per_minute = 60000\nrequests_per_minute = {}\nsharing = "none"\n[tenants.acme.each_subject]\n'
    limits = f"[tenants.acme]\n{limits}requests_per_minute = 5\n"
    gateway = gateway_with(tmp_path, limits.format(1000), *keys)
    before = await ask(gateway, "one")
    await ask(gateway, "two", messages=[{"role": "user", "content": "x" * 4_000}])
    after = await ask(gateway, "one")
    seen = [
        [value for name, value in answer.headers.items() if name.startswith("x-ratelimit") and "reset" not in name]
        for answer in (before, after)
    ]
    assert seen == [["5", "4"], ["5", "3"]]
    # At the tenant's limit, a refusal is inevitable; how much is lacking is known in whole seconds only.
    (tmp_path / "limits.toml").write_text(limits.format(3))
    limited = gateway_with(tmp_path, limits.format(3), *keys)
    for key in ("two", "two", "two"):
        await ask(limited, key)
    refused = await ask(limited, "one")
    assert "organization" in error_of(refused, 429)["message"]
    assert int(refused.headers["retry-after-ms"]) % 1000 == 0
    assert "x-ratelimit-limit-tokens" not in refused.headers
