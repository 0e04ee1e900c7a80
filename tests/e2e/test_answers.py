"""The real model through all five services, asked by an unmodified OpenAI client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    from tests.e2e.served import Served

CAPITAL = "The capital of France is"
COLORS: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three primary colors."}]


def test_a_completion_is_right(served: Served) -> None:
    answer = served.client().completions.create(model=served.model, prompt=CAPITAL, max_tokens=5, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)


def test_a_streamed_completion_has_the_same_text(served: Served) -> None:
    client = served.client()
    whole = client.completions.create(model=served.model, prompt=CAPITAL, max_tokens=24, temperature=0)
    stream = client.completions.create(model=served.model, prompt=CAPITAL, max_tokens=24, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    reasons: list[str | None] = [chunk.choices[0].finish_reason for chunk in chunks]  # the SDK's type leaves None out
    assert [reason for reason in reasons if reason is not None] == ["length"]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_a_chat_is_right(served: Served) -> None:
    answer = served.client().chat.completions.create(model=served.model, messages=COLORS, max_tokens=64, temperature=0)
    text = (answer.choices[0].message.content or "").lower()
    assert all(color in text for color in ("red", "blue", "yellow"))
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"


def test_a_streamed_chat_has_the_same_text_and_one_usage(served: Served) -> None:
    client = served.client()
    whole = client.chat.completions.create(model=served.model, messages=COLORS, max_tokens=64, temperature=0)
    stream = client.chat.completions.create(
        model=served.model,
        messages=COLORS,
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert next(chunk.choices[0].delta.role for chunk in chunks if chunk.choices) == "assistant"
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == 1
    assert whole.usage is not None
    assert usages[0].completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []


def test_a_seed_makes_sampling_repeatable(served: Served) -> None:
    client = served.client()

    def draw(seed: int) -> str:
        answer = client.completions.create(
            model=served.model, prompt="Once upon a time", max_tokens=16, temperature=1.0, seed=seed
        )
        return answer.choices[0].text

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in (1, 2, 3)}) > 1


def test_several_choices_are_drawn_independently(served: Served) -> None:
    answer = served.client().completions.create(
        model=served.model, prompt="Once upon a time", max_tokens=16, temperature=1.0, n=3, seed=5
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(16 for _ in answer.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(served: Served, stream: bool) -> None:
    client = served.client()
    prompt = "1, 2, 3, 4, 5,"
    if stream:
        chunks = client.completions.create(
            model=served.model, prompt=prompt, max_tokens=40, temperature=0, stop=[" 9"], stream=True
        )
        received = list(chunks)
        text, reason = "".join(chunk.choices[0].text for chunk in received), received[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(model=served.model, prompt=prompt, max_tokens=40, temperature=0, stop=[" 9"])
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert text.strip().startswith("6, 7, 8,")
    assert "9" not in text
    assert reason == "stop"


def test_log_probabilities_belong_to_the_tokens_of_the_answer(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=served.model, messages=COLORS, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_the_served_model_is_listed(served: Served) -> None:
    assert [model.id for model in served.client().models.list()] == [served.model]
