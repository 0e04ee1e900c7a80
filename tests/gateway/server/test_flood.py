"""A flood of wrong requests on real connections: no defect shows, nothing is left behind, nobody else notices."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from tests.gateway.fuzzing import fuzz, request, send
from tests.gateway.listening import listening
from tests.gateway.support import HELLO, FakedGateway, events, faked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event

from tests.fakes.pipeline import says

WORDS = tuple(f"w{number} " for number in range(300))


def script(asked: GenerateRequest) -> Iterable[Event]:
    is_bystander = asked.view.subject.name == "user/bystander"
    return says(*(WORDS if is_bystander else ("x", "y")))(asked)


async def bystander(port: int) -> str:
    body = {"model": "tiny", "messages": HELLO, "stream": True, "user": "bystander"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert sum(1 for _ in events(response.text)) == len(WORDS) + 3
    return response.text


async def flood(count: int, seed: int) -> FakedGateway:
    gateway = faked(script, anonymous="vouched")
    gateway.pipeline.pause_s = 0.001
    async with listening(gateway) as port:
        undisturbed = asyncio.create_task(bystander(port))
        tally = await fuzz(port, count, seed)
        assert not tally.unexpected, tally.unexpected[:3]
        assert tally.sent >= count - 16
        # Neither all refused nor all accepted: the generator reaches both.
        assert tally.statuses[200] > count / 20
        assert tally.statuses[400] > count / 20
        assert await undisturbed
        assert (await send(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )
    assert len(gateway.journal) == 0
    assert gateway.generations.open_requests == 0
    gateway.pipeline.submitted.clear()
    return gateway


@pytest.mark.timeout(300)
async def test_no_request_out_of_two_thousand_is_a_server_error() -> None:
    await flood(2_000, seed=1)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_no_request_out_of_fifty_thousand_is_a_server_error_and_memory_stays() -> None:
    await flood(5_000, seed=2)
    gc.collect()
    before = psutil.Process().memory_info().rss
    await flood(50_000, seed=3)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 100 * 2**20


def test_the_request_generator_is_deterministic() -> None:
    import random

    assert [request(random.Random(5)) for _ in range(3)] == [request(random.Random(5)) for _ in range(3)]
