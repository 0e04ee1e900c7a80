"""Many users at once, and what one of them may notice of another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from openai import omit

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

    from tests.e2e.served import Served

# Long enough for several whole pages.
SYSTEM = "You are the patient guide of a botanical garden. " * 12


def cached_tokens(served: Served, messages: list[ChatCompletionMessageParam], user: str | None) -> tuple[int, str]:
    answer = served.client().chat.completions.create(
        model=served.model, messages=messages, max_tokens=16, temperature=0, user=user or omit
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].message.content or ""


def test_the_second_turn_of_a_conversation_reuses_the_first(served: Served) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Which trees are here?"},
    ]
    first, answer = cached_tokens(served, messages, "second-turn")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And which flowers?"}]
    second, _ = cached_tokens(served, messages, "second-turn")
    assert first == 0
    # Everything of the first turn but the rest of a page.
    assert second >= 120


def test_a_prompt_of_one_user_gives_others_no_cache_hits(served: Served) -> None:
    def ask(weather: str, user: str | None) -> int:
        # Unlike any other prompt from its first words on: three users make what they share public.
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": f"It is {weather} today. {SYSTEM}"},
            {"role": "user", "content": "Shall I come?"},
        ]
        return cached_tokens(served, messages, user)[0]

    assert [ask("rainy", user) for user in ("alice", "bob")] == [0, 0]
    assert ask("rainy", "alice") > 0
    assert [ask("sunny", user) for user in ("alice", None)] == [0, 0]


async def test_32_users_stream_concurrently_and_each_gets_its_own_answer(served: Served) -> None:
    client = served.async_client()
    questions = [f"Count from {first} to {first + 5}: {first}, {first + 1}," for first in range(1, 33)]
    with served.leaving_nothing_behind():
        together = await asyncio.gather(
            *(stream(client, served.model, question, f"user-{i}") for i, question in enumerate(questions))
        )
    for index in (0, 13, 31):
        alone = await stream(client, served.model, questions[index], f"alone-{index}")
        assert together[index] == alone
    for first, text in enumerate(together, start=1):
        assert f"{first + 2}" in text


async def stream(client: AsyncOpenAI, model: str, prompt: str, user: str) -> str:
    chunks = await client.completions.create(
        model=model, prompt=prompt, max_tokens=12, temperature=0, user=user, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])
