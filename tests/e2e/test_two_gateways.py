"""Two gateways behind one address, with a real Redis or Valkey: they act as one, also while the server restarts."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import GatewaySettings
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.e2e.two_gateways import TwoGateways, two_gateways
from tests.fakes.redis_process import temporary_redis
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.fakes.redis_process import RedisProcess

KEYS = [
    ApiKey("flood", hash_of("flood"), "flooders"),
    ApiKey("ann", hash_of("ann"), "acme", "ann"),
    ApiKey("bob", hash_of("bob"), "acme", "bob"),
]
LIMITS = "[tenants.flooders]\nrequests_per_minute = 300\n[tenants.acme]\nconcurrent = 3\n"
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in ("ann", "bob"))
REQUESTS, LIMIT = 3_000, 300
LINK = 'pando_gateway_link_connected{link="state"'


@pytest.mark.slow
async def test_two_gateways_act_as_one_while_their_state_restarts(run_root: Path) -> None:
    directory = run_root / "two-gateways"
    directory.mkdir()
    save_keys(directory / "keys.toml", KEYS)
    (directory / "limits.toml").write_text(LIMITS)
    with temporary_redis() as redis_process:
        async with two_gateways(
            directory,
            limits_file=directory / "limits.toml",
            keys_file=directory / "keys.toml",
            **{"state.url": redis_process.url},
        ) as gateways:
            await until_shared(gateways, redis_process)
            await check_limit(gateways)
            await check_responses(gateways)
            await check_aborts(gateways)
            redis_process.kill()
            await check_without_state(gateways)
            redis_process.start()
            await until_shared(gateways, redis_process)
            await check_responses(gateways)
            await check_aborts(gateways)


async def check_limit(gateways: TwoGateways) -> None:
    """Of three thousand requests, exactly as many pass as the limit says, through both gateways."""
    started = time.monotonic()
    statuses = await gateways.flood(REQUESTS, "flood")
    print(json.dumps({"statuses": statuses, "seconds": round(time.monotonic() - started, 1)}))  # noqa: T201  (a figure)
    assert statuses == {200: LIMIT, 429: REQUESTS - LIMIT}
    served = [
        await gateways.metric(port, 'pando_gateway_requests_total{route="/v1/chat/completions",status="200"}')
        for port in gateways.metrics_ports
    ]
    assert sum(served) == LIMIT
    assert min(served) > LIMIT / 10, "each gateway had its part"


async def check_responses(gateways: TwoGateways) -> None:
    """Each request goes to the other gateway than the one before."""
    body = {"model": "tiny", "input": "Hello"}
    async with gateways.client() as client:
        for stream in (False, True):
            created = await client.post("/v1/responses", json={**body, "stream": stream}, headers=ANN)
            path = "/v1/responses/" + created.text.partition('"id":"')[2].partition('"')[0]
            for who, status in ((ANN, 200), (BOB, 404), (ANN, 200)):
                assert (await client.get(path, headers=who)).status_code == status
            for _ in range(2):
                continued = {**body, "previous_response_id": path.rpartition("/")[2]}
                assert (await client.post("/v1/responses", json=continued, headers=ANN)).status_code == 200
            assert (await client.get(f"{path}/input_items", headers=ANN)).json()["data"][0]["role"] == "user"
            assert (await client.delete(path, headers=ANN)).json()["deleted"] is True
            for _ in range(2):
                assert (await client.get(path, headers=ANN)).status_code == 404


async def check_aborts(gateways: TwoGateways) -> None:
    """Requests that are open at either gateway are ended through either, by their owner alone."""
    services = gateways.services
    services.automatic, before = 1, len(services.aborts)
    async with gateways.client() as client:

        async def abort(rid: str, who: dict[str, str]) -> int:
            answer: Any = (
                (await client.post("/abort_request", json={"rid": rid}, headers=who)).raise_for_status().json()
            )
            return int(answer["aborted"])

        for turn in range(2):
            first = len(services.requests)
            # Three, so that the aborts come from the same gateway and from the other; and no fourth may be open.
            names = [f"request-{turn}-{number}" for number in range(3)]
            asking = [asyncio.create_task(generate(client, name)) for name in names]
            await services.until(lambda first=first: len(services.requests) == first + 3)
            assert (await generate(client, "fourth")).status_code == 429
            assert [await abort(name, BOB) for name in names for _ in range(2)] == [0] * 6
            assert [await abort(name, ANN) for name in names] == [1] * 3
            assert [(await task).status_code for task in asking] == [400] * 3
            assert [await abort(name, ANN) for name in names] == [0] * 3
    assert len(services.aborts) == before + 6
    services.automatic = 1_000_000


async def check_without_state(gateways: TwoGateways) -> None:
    """Chats go on, under each gateway's own limits; responses cannot be had, and say when to ask again."""
    async with gateways.client() as client:
        for _ in range(6):
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
            answer = await client.post("/v1/chat/completions", json=chat, headers=ANN)
            assert answer.status_code == 200
        await until_away(gateways)
        for _ in range(2):
            refused = await client.post("/v1/responses", json={"model": "tiny", "input": "Hello"}, headers=ANN)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
    # Open is the default: now each gateway allows what both together did.
    statuses = await gateways.flood(3 * LIMIT, "flood")
    assert statuses == {200: 2 * LIMIT, 429: LIMIT}
    for port in gateways.metrics_ports:
        assert await gateways.metric(port, LINK) == 0
        assert await gateways.metric(port, "pando_gateway_unshared_limits_total") >= LIMIT


async def until_away(gateways: TwoGateways) -> None:
    """Wait until both gateways have noticed that their state is away."""
    async with asyncio.timeout(150):
        for port in gateways.metrics_ports:
            while await gateways.metric(port, LINK):  # noqa: ASYNC110  (another process's)
                await asyncio.sleep(0.1)


async def until_shared(gateways: TwoGateways, redis_process: RedisProcess) -> None:
    """Wait until both gateways have connected to their state by themselves, and listen for aborts."""
    async with asyncio.timeout(150):
        for port in gateways.metrics_ports:
            while not await gateways.metric(port, LINK):  # noqa: ASYNC110  (another process's)
                await asyncio.sleep(0.1)
    channel = f"{GatewaySettings().state.prefix}:aborts"
    with redis_process.client() as client:
        await until(lambda: client.pubsub_numsub(channel) == [(channel.encode(), len(gateways.metrics_ports))])


async def generate(client: httpx.AsyncClient, rid: str) -> httpx.Response:
    return await client.post("/generate", json={"text": "Hello", "rid": rid}, headers=ANN)
