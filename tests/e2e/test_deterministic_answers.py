"""`model.deterministic`: an answer has the same log probabilities, to the last bit, alone and beside others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import GatewaySettings, Settings
from common.settings.model import ModelSettings
from tests.e2e.conftest import require_model, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai import AsyncOpenAI

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended
PROMPT = "The lighthouse keeper wrote in his diary that night: " * 6


@pytest.fixture(scope="module")
def deterministic(run_root: Path) -> Iterator[Served]:
    require_model()
    gateway = GatewaySettings(port=0, anonymous="vouched")
    yield from serve(Settings(gateway=gateway, model=ModelSettings(deterministic=True)), run_root)


async def answer(client: AsyncOpenAI, model: str, user: str, **options: Any) -> list[tuple[str, float]]:
    found = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=24, logprobs=True, user=user, seed=7,
        **options,
    )  # fmt: skip
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    return [(token.token, token.logprob) for token in logprobs.content or ()]


async def test_an_answer_does_not_depend_on_what_runs_beside_it_or_on_the_cache(deterministic: Served) -> None:
    client = deterministic.async_client()
    alone = await answer(client, deterministic.model, "alone")
    cached = await answer(client, deterministic.model, "alone")
    beside = await asyncio.gather(*(answer(client, deterministic.model, f"user {number}") for number in range(6)))
    assert len(alone) > 10
    assert all(each == alone for each in (cached, *beside))
