"""A flood of wrong requests on all five services: nothing is left behind, and another stream goes on undisturbed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.gateway.fuzzing import fuzz, request

if TYPE_CHECKING:
    from tests.e2e.served import Served


async def stream(served: Served) -> str:
    chunks = await served.async_client().completions.create(
        model=served.model, prompt="Once upon a time", max_tokens=200, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in chunks])


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_thousand_wrong_requests_leave_no_page_and_disturb_nobody(served: Served) -> None:
    alone = await stream(served)
    port = urlsplit(served.url).port
    assert port is not None
    with served.leaving_nothing_behind():
        undisturbed = asyncio.create_task(stream(served))
        tally = await fuzz(port, 1_000, seed=7, lanes=4, make=partial(request, model=served.model), leave_after_s=3.0)
        assert await undisturbed == alone
    assert not tally.unexpected, tally.unexpected[:3]
    assert tally.statuses[200] > 20
    assert tally.left < 200
    assert served.is_ready()
