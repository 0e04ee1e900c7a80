from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from common.deltas import Delta
from common.errors import ConfigurationError
from gateway.server.http_server import HttpServer
from tests.fakes.pipeline import STOP
from tests.gateway.listening import listening
from tests.gateway.support import HELLO, faked, gateway_saying
from tests.waiting import until


async def test_open_requests_finish_and_new_ones_are_refused_while_draining() -> None:
    gateway = faked(None)
    server = HttpServer(gateway.app, "127.0.0.1", 0)
    stopping = asyncio.Event()
    serving = asyncio.create_task(server.serve(stopping, gateway.generations, drain_s=60))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}))
        (request,) = await gateway.pipeline.submissions(1)
        stopping.set()
        await until(lambda: gateway.generations.draining)
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
        assert refused.status_code == 503
        assert refused.headers["x-should-retry"] == "true"
        gateway.pipeline.tell(Delta(request.request_id, 0, 0, (1,), "done", finish=STOP))
        assert (await asking).json()["choices"][0]["text"] == "done"
    await asyncio.wait_for(serving, 30)


async def test_requests_that_do_not_finish_in_time_are_cut_and_aborted() -> None:
    gateway = faked(None)
    server = HttpServer(gateway.app, "127.0.0.1", 0)
    stopping = asyncio.Event()
    serving = asyncio.create_task(server.serve(stopping, gateway.generations, drain_s=0.05))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}))
        await gateway.pipeline.submissions(1)
        stopping.set()
        answer = await asking
        assert answer.status_code == 503
        assert answer.headers["x-should-retry"] == "true"
    await asyncio.wait_for(serving, 30)
    assert len(gateway.pipeline.aborted) == 1


async def test_an_address_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="cannot listen"):
        HttpServer(gateway_saying("x").app, "127.0.0.1", taken.getsockname()[1])


async def test_too_large_body_is_answered_although_the_client_is_still_sending() -> None:
    gateway = gateway_saying("x")
    async with listening(gateway) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 10_000_000})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert (await client.get("/health")).status_code == 200


async def test_keep_alive_connection_serves_many_requests() -> None:
    gateway = gateway_saying("a", "b")
    async with listening(gateway) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for _ in range(20):
            response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True})
            assert response.text.endswith("data: [DONE]\n\n")
    assert gateway.pipeline.aborted == []
