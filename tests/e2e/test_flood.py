"""Floods of wrong requests on all five services: nothing is left behind, and other streams go on undisturbed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
import pytest

from tests.gateway.fuzzing import fuzz, loiter, request

if TYPE_CHECKING:
    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
REQUESTS = int(os.environ.get("FLOOD_REQUESTS", "50000"))
WARM_UP_REQUESTS = REQUESTS // 16
# Of one service, between the end of the warm-up and the end of the flood. A leak of 2 KiB with each request is more.
MOST_GROWTH_BYTES = 96 * 2**20


async def stream(served: Served, prompt: str = "Once upon a time", max_tokens: int = 200) -> str:
    chunks = await served.async_client().completions.create(
        model=served.model, prompt=prompt, max_tokens=max_tokens, temperature=0, seed=1, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in chunks])


def port_of(served: Served) -> int:
    port = urlsplit(served.url).port
    assert port is not None
    return port


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_hundreds_of_wrong_requests_leak_no_page_and_disturb_no_stream(served: Served) -> None:
    alone = await stream(served)
    make = partial(request, model=served.model)
    with served.leaving_nothing_behind():
        undisturbed = asyncio.create_task(stream(served))
        tally = await fuzz(port_of(served), 400, seed=7, lanes=4, make=make, leave_after_s=2.0)
        assert await undisturbed == alone
    assert not tally.unexpected, tally.unexpected[:3]
    # The others are answered at once; those that generate may be left on a slow machine.
    assert tally.statuses[200] + tally.left > 20
    assert tally.statuses[400] > 100
    assert served.is_ready()


def memory_of(served: Served) -> dict[str, int]:
    """Return each service's resident memory in bytes, its children's included."""
    found = {}
    for name in SERVICES:
        pid = served.deployment.pid_of(name)
        assert pid is not None, f"{name} is not there"
        process = psutil.Process(pid)
        found[name] = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    return found


async def well_behaved(served: Served, alone: dict[str, str], until: asyncio.Event) -> int:
    """Ask again and again, and get what was got alone; return how often."""
    answers = 0
    while not until.is_set():
        for prompt, text in alone.items():
            assert await stream(served, prompt) == text
            answers += 1
            await asyncio.sleep(0.5)
    return answers


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_fifty_thousand_wrong_requests_leave_nothing_behind(served_fake: Served) -> None:
    served, make = served_fake, partial(request, model=served_fake.model)
    alone = {prompt: await stream(served, prompt) for prompt in ("one", "two", "three")}
    pids = {name: served.deployment.pid_of(name) for name in SERVICES}
    await fuzz(port_of(served), WARM_UP_REQUESTS, seed=11, make=make, leave_after_s=2.0)
    before, started, done = memory_of(served), time.monotonic(), asyncio.Event()
    with served.leaving_nothing_behind():
        bystanders = [asyncio.create_task(well_behaved(served, alone, done)) for _ in range(2)]
        loitering = asyncio.create_task(loiter(port_of(served), 12, done, lanes=4))
        tally = await fuzz(port_of(served), REQUESTS, seed=13, make=make, leave_after_s=2.0)
        done.set()
        answers = sum(await asyncio.gather(*bystanders))
        connections = await loitering
    growth = {name: after - before[name] for name, after in memory_of(served).items()}
    report = {
        "requests": tally.sent,
        "statuses": dict(sorted(tally.statuses.items())),
        "answers not waited for": tally.left,
        "undisturbed streams": answers,
        "loitering connections": connections,
        "growth in KiB": {name: size // 1024 for name, size in growth.items()},
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(report))  # noqa: T201  (the figures are what this is run for)
    assert not tally.unexpected, tally.unexpected[:3]
    assert tally.sent >= REQUESTS - 16
    assert min(tally.statuses[200], tally.statuses[400]) > REQUESTS / 20
    assert answers > 0
    assert pids == {name: served.deployment.pid_of(name) for name in SERVICES}, "no service has died"
    assert max(growth.values()) < MOST_GROWTH_BYTES, growth
    assert served.is_ready()
