"""A seed draws the same tokens whatever the batch, the number of choices, retractions, and services that die."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from common.sampling import choice_seed
from tests.e2e.greedy.checks import TIMEOUT_S, serve_rows
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai import AsyncOpenAI

    from tests.e2e.served import Served

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.extended]

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils when",
    "In the beginning",
    "Dear Sir or Madam,",
    "The three laws of",
    "My favourite colour is",
)
TOKENS = 40
# Too few for four prompts to end, so that rows are retracted; enough for each alone.
PAGES = 10


@pytest.fixture(scope="module")
def sampling(run_root: Path) -> Iterator[Served]:
    """A deployment with few pages."""
    yield from serve_rows(run_root, device_pages=PAGES)


@pytest.fixture(scope="module")
def alone(sampling: Served) -> dict[str, str]:
    """What each prompt is continued with when nothing else runs."""

    async def ask() -> dict[str, str]:
        async with sampling.async_client() as client:
            return {prompt: (await draw(client, sampling, prompt, seed))[0] for seed, prompt in enumerate(PROMPTS)}

    return asyncio.run(ask())


async def draw(client: AsyncOpenAI, served: Served, prompt: str, seed: int, n: int = 1) -> list[str]:
    answer = await client.completions.create(
        model=served.model,
        prompt=prompt,
        seed=seed,
        n=n,
        max_tokens=TOKENS,
        temperature=1.0,
        user=f"user {seed}",
        extra_body={"ignore_eos": True},
    )
    return [choice.text for choice in answer.choices]


async def test_sampled_outputs_are_the_same_in_a_batch_with_retractions(
    sampling: Served, alone: dict[str, str]
) -> None:
    before = sampling.state().retractions
    with sampling.leaving_nothing_behind():
        async with sampling.async_client() as client:
            found = await asyncio.gather(*(draw(client, sampling, prompt, i) for i, prompt in enumerate(PROMPTS)))
    assert {prompt: texts[0] for prompt, texts in zip(PROMPTS, found, strict=True)} == alone
    assert sampling.state().retractions > before


async def test_several_choices_are_sampled_as_single_ones_with_their_seeds(
    sampling: Served, alone: dict[str, str]
) -> None:
    async with sampling.async_client() as client:
        texts = await draw(client, sampling, PROMPTS[0], 0, n=3)
        singly = [(await draw(client, sampling, PROMPTS[0], choice_seed(0, i)))[0] for i in range(3)]
    assert texts == singly
    assert texts[0] == alone[PROMPTS[0]]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    "service", ["worker", *(pytest.param(other, marks=pytest.mark.soak) for other in ("scheduler", "detokenizer"))]
)
async def test_sampled_output_survives_the_death_of_a_service(
    sampling: Served, alone: dict[str, str], service: str
) -> None:
    async with sampling.async_client() as client:
        stream = await client.completions.create(
            model=sampling.model, prompt=PROMPTS[0], seed=0, max_tokens=TOKENS, temperature=1.0, user="user 0",
            stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        text, killed = "", False
        async for chunk in stream:
            text += chunk.choices[0].text
            if not killed and len(text) > 10:
                sampling.deployment.kill(service)
                killed = True
    assert killed
    assert text == alone[PROMPTS[0]]
    wait_until(sampling.is_ready, 120.0)
