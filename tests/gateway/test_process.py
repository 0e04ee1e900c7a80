"""The whole gateway over gRPC, with services that die."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
from prometheus_client import CollectorRegistry

from common.settings import GatewaySettings, Settings
from gateway.assembly import Gateway
from gateway.generation.journal import ResumePolicy
from tests.fakes.pipeline_servers import DETOKENIZER, TOKENIZER, FakeServices, pipeline_servers
from tests.gateway.support import HELLO, events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BODY: dict[str, Any] = {"model": "tiny", "messages": HELLO}


@asynccontextmanager
async def gateway_over(services: FakeServices, resume: ResumePolicy | None = None) -> AsyncIterator[httpx.AsyncClient]:
    settings = GatewaySettings(
        port=0, drain_s=30, tokenizer=(services.address(TOKENIZER),), detokenizer=(services.address(DETOKENIZER),)
    )
    gateway = Gateway(Settings(gateway=settings), CollectorRegistry(), resume=resume)
    stopping = asyncio.Event()
    running = asyncio.create_task(gateway.run(stopping))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=60) as client:
            yield client
    finally:
        stopping.set()
        await running


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  (as a load balancer would)
            await asyncio.sleep(0.01)


async def test_ready_only_when_a_request_would_be_served(tmp_path: Path) -> None:
    services = FakeServices(tmp_path)
    async with gateway_over(services) as client:
        assert (await client.get("/health")).status_code == 200
        response = await client.get("/ready")
        assert response.status_code == 503
        assert len(response.json()["missing"]) == 2
        async with pipeline_servers(tmp_path):
            await until_ready(client)


async def test_answer_through_real_streams(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, gateway_over(services) as client:
        await until_ready(client)
        whole = (await client.post("/v1/chat/completions", json=BODY)).json()
        assert whole["choices"][0]["message"]["content"] == "Hello world"
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        stream = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
        assert _content(stream.text) == "Hello world"
        metrics = (await client.get("/metrics")).text
        assert 'pando_gateway_link_connected{link="tokenizer",model=""} 1.0' in metrics


@pytest.mark.parametrize("service", [TOKENIZER, DETOKENIZER])
async def test_client_sees_only_a_pause_when_a_service_is_restarted(tmp_path: Path, service: str) -> None:
    async with pipeline_servers(tmp_path, automatic=2) as services, gateway_over(services) as client:
        await until_ready(client)
        text = ""
        async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True, "n": 2}) as response:
            async for piece in response.aiter_text():
                text += piece
                # Of each choice "Hel" and "lo" have come.
                if text.count('"lo"') == 2 and not services.release.is_set():
                    await services.kill(service)
                    await asyncio.sleep(0.1)
                    await services.start(service)
                    services.release.set()
    assert _content(text) == "Hello world"
    assert _content(text, choice=1) == "Hello world"
    if service == DETOKENIZER:
        resumed = services.requests[1:]
        assert [list(one.resume.token_ids) for one in resumed] == [[0, 1], [0, 1]]
        assert {one.resume.delivered_characters for one in resumed} == {len("Hello")}


async def test_request_waits_for_a_tokenizer_that_starts_again(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, gateway_over(services) as client:
        await until_ready(client)
        assert (await client.get("/v1/models")).status_code == 200
        await services.kill(TOKENIZER)
        await asyncio.sleep(0.1)
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await asyncio.sleep(0.1)
        await services.start(TOKENIZER)
        response = await asyncio.wait_for(asking, 30)
    assert response.json()["choices"][0]["message"]["content"] == "Hello world"


async def test_an_unreachable_pipeline_gives_503_within_the_deadline(tmp_path: Path) -> None:
    resume = ResumePolicy(deadline_s=0.3)
    async with pipeline_servers(tmp_path) as services, gateway_over(services, resume) as client:
        await until_ready(client)
        assert (await client.get("/v1/models")).status_code == 200
        await services.kill(DETOKENIZER)
        await asyncio.sleep(0.1)
        response = await asyncio.wait_for(client.post("/v1/chat/completions", json=BODY), 30)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "detokenizer" in response.json()["error"]["message"]


async def test_a_disconnect_reaches_the_pipeline_as_an_abort(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path, automatic=1) as services, gateway_over(services) as client:
        await until_ready(client)
        async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            async for line in response.aiter_lines():
                if "Hel" in line:
                    break
        await services.until(lambda: services.aborts)
    assert services.aborts == [services.requests[0].request_id]


def _content(text: str, choice: int = 0) -> str:
    documents = [orjson.loads(event) for event in events(text) if event != "[DONE]"]
    assert not any("error" in document for document in documents), text
    parts = [part for document in documents for part in document["choices"] if part["index"] == choice]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
    return "".join(part["delta"].get("content", "") for part in parts)
