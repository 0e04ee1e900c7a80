"""The newer endpoints and stop conditions, over all five services and the real model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from openai import BadRequestError, NotFoundError

from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.e2e.served import Served

PROMPT = "The capital of France is"
# Several pages of the cache.
LONG = "The capital of France is Paris, and that of Italy is Rome. " * 8
CHAT: Any = [{"role": "user", "content": "Name three primary colors."}]


def generate(served: Served, **body: Any) -> Any:
    with served.http() as http:
        response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_pattern_ends_the_text_whatever_the_tokens(served: Served) -> None:
    greedy = {"max_new_tokens": 24, "temperature": 0}
    whole = generate(served, text=PROMPT, sampling_params=greedy)["text"]
    pattern = "[.,] ?[A-Z]?"
    match = re.search(pattern, whole)
    assert match is not None
    cut = generate(served, text=PROMPT, sampling_params={**greedy, "stop_regex": pattern})
    assert cut["text"] == whole[: match.start()]
    assert cut["meta_info"]["finish_reason"]["type"] == "stop"
    kept = generate(served, text=PROMPT, sampling_params={**greedy, "stop_regex": pattern, "no_stop_trim": True})
    assert kept["text"].startswith(whole[: match.start()])
    assert len(kept["text"]) > match.start()


def test_a_pattern_that_cannot_be_used_is_refused_by_name(served: Served) -> None:
    with pytest.raises(BadRequestError) as refused:
        served.client().completions.create(model=served.model, prompt="x", extra_body={"stop_regex": r"(a)\1"})
    assert refused.value.param == "stop_regex"


def test_best_of_is_among_the_choices_and_the_best(served: Served) -> None:
    client = served.client()
    common: Any = {"model": served.model, "prompt": PROMPT, "max_tokens": 5, "seed": 7, "logprobs": 0}
    every = client.completions.create(n=4, **common).choices
    [best] = client.completions.create(n=1, best_of=4, **common).choices

    def mean(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))

    assert best.text == max(every, key=mean).text


def test_a_biased_token_is_always_chosen(served: Served) -> None:
    with served.http() as http:
        token = http.post("/tokenize", json={"prompt": " Rome"}).json()["tokens"][0]
    answer = generate(served, text=PROMPT, sampling_params={"max_new_tokens": 2, "logit_bias": {str(token): 100}})
    assert answer["output_ids"] == [token, token]


def test_responses_are_created_streamed_continued_and_deleted(served: Served) -> None:
    client = served.client()
    first = client.responses.create(
        model=served.model, input="Name three primary colors.", max_output_tokens=4, temperature=0
    )
    chat = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=4, temperature=0)
    assert first.output_text == chat.choices[0].message.content
    assert first.status == "incomplete"
    events = list(
        client.responses.create(
            model=served.model, input="And another?", previous_response_id=first.id, max_output_tokens=8, stream=True
        )
    )
    assert events[0].type == "response.created"
    final = events[-1]
    assert final.type in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)


def test_messages_and_chat_return_the_same_text(served: Served) -> None:
    chat = served.client().chat.completions.create(model=served.model, messages=CHAT, max_tokens=12, temperature=0)
    with served.http() as http:
        body = {"model": served.model, "max_tokens": 12, "messages": CHAT, "temperature": 0}
        message = http.post("/v1/messages", json=body).json()
    assert message["content"][0]["text"] == chat.choices[0].message.content
    assert message["stop_reason"] == "max_tokens"


def test_a_flush_over_loopback_empties_the_cache(served: Served) -> None:
    def cached_tokens() -> int:
        usage = served.client().completions.create(model=served.model, prompt=LONG, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    wait_until(served.is_idle, timeout_s=120)
    cached_tokens()
    wait_until(served.is_idle, timeout_s=120)
    assert cached_tokens() > 0
    wait_until(served.is_idle, timeout_s=120)
    with served.http() as http:
        flushed = http.post("/flush_cache")
        assert flushed.status_code == 200
        [pages] = re.findall(r"(\d+) pages", flushed.text)
        info = http.get("/get_server_info").json()
    assert int(pages) > 0
    [device, *_] = served.state().tiers
    assert device.free_pages == device.capacity_pages
    assert cached_tokens() == 0
    assert info["internal_states"][0]["worker_group"]


def test_tools_are_refused_by_a_model_whose_template_knows_none(served: Served) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(BadRequestError) as refused:
        served.client().chat.completions.create(model=served.model, messages=CHAT, tools=[tool])
    assert refused.value.param == "tools"
