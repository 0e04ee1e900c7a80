"""Greedy answers are those of `transformers` in fp32 where every prompt is computed in one piece."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from openai.types import CompletionChoice

from tests.e2e.greedy.checks import (
    GROWING,
    REFERENCES,
    SHORT,
    TIMEOUT_S,
    cacheable,
    check_alone,
    check_cache_off,
    check_cached_answers,
    check_scores,
    check_together,
    pick,
    serve_rows,
)
from tests.e2e.greedy.prompts import PROMPTS
from tests.e2e.greedy.reference import OUTPUT_TOKENS
from tests.e2e.greedy.score_reference import NAMES, read_scores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai import AsyncOpenAI
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from tests.e2e.greedy.prompts import Prompt
    from tests.e2e.greedy.reference import Reference
    from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def whole(run_root: Path) -> Iterator[Served]:
    """A deployment whose steps have room for the longest prompt."""
    yield from serve_rows(run_root, max_step_tokens=4096)


@pytest.mark.parametrize("first", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_alone(whole: Served, first: int) -> None:
    check_alone(whole, SHORT[first::4])


@pytest.mark.slow
def test_sixteen_together_with_cold_and_with_cached_prompts(whole: Served) -> None:
    # One prompt of two thousand tokens is enough here; `test_chunked` has both.
    check_together(whole, [reference for reference in REFERENCES if reference.name != "length-2000-chinese"])


def test_continued_answers_are_served_from_the_cache(whole: Served) -> None:
    check_cached_answers(whole, GROWING[1:])


@pytest.mark.extended
def test_with_the_cache_off(whole: Served) -> None:
    check_cache_off(whole, [reference for reference in SHORT if cacheable(len(reference.prompt_ids))])


def test_prompts_are_scored(whole: Served) -> None:
    check_scores(whole, NAMES)


def test_evaluation_harnesses_can_score(whole: Served) -> None:
    """As they do it: several prompts as ids, echoed with log probabilities, with one token of output or none."""
    asked, scores = pick("english-physics", "chinese-capitals"), read_scores()
    for max_tokens in (0, 1):
        body = {
            "model": whole.model,
            "prompt": [list(reference.prompt_ids) for reference in asked],
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "echo": True,
        }
        with whole.http() as http:
            choices = http.post("/v1/completions", json=body).json()["choices"]
        for choice, reference in zip(choices, asked, strict=True):
            told = choice["logprobs"]
            prompt = len(reference.prompt_ids)
            assert len(told["tokens"]) == prompt + max_tokens
            assert told["token_logprobs"][0] is None
            assert told["token_logprobs"][1:prompt] == pytest.approx(scores[reference.name]["logprobs"], abs=1e-3)
            assert told["text_offset"] == sorted(told["text_offset"])
            assert choice["text"].startswith(told["tokens"][0])
            assert max_tokens == 0 or told["text_offset"][prompt] == len(reference_text(whole, reference))


def reference_text(served: Served, reference: Reference) -> str:
    """Return the text of a prompt."""
    with served.http() as http:
        text: str = http.post("/detokenize", json={"model": served.model, "tokens": list(reference.prompt_ids)}).json()[
            "prompt"
        ]
    return text


async def test_text_through_gateway_and_tokenizer(whole: Served) -> None:
    client = whole.async_client()
    asked = [prompt for prompt in PROMPTS if prompt.cut_to is None]
    replies = await asyncio.gather(*(complete(client, whole.model, prompt) for prompt in asked))
    names = {prompt.name for prompt in asked}
    assert {prompt.name: describe(reply) for prompt, reply in zip(asked, replies, strict=True)} == {
        reference.name: (reference.text, len(reference.prompt_ids), len(reference.output_ids), reference.finish.value)
        for reference in REFERENCES
        if reference.name in names
    }


async def complete(client: AsyncOpenAI, model: str, prompt: Prompt) -> Completion | ChatCompletion:
    if prompt.is_chat:
        return await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt.text}],
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
        )
    return await client.completions.create(model=model, prompt=prompt.text, max_tokens=OUTPUT_TOKENS, temperature=0)


def describe(reply: Completion | ChatCompletion) -> tuple[str | None, int, int, str]:
    """Return text, tokens of prompt and answer, and why it ended."""
    choice = reply.choices[0]
    assert reply.usage is not None
    text = choice.text if isinstance(choice, CompletionChoice) else choice.message.content
    return text, reply.usage.prompt_tokens, reply.usage.completion_tokens, choice.finish_reason
