from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.records import BenchRequest, Segment
from deploy.evaluation.bench.target import TargetError, base_url, find_model, measure_tokens_per_word, open_client
from tests.fakes.openai_server import free_url

if TYPE_CHECKING:
    from tests.fakes.openai_server import FakeOpenAIServer


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1", " http://h:1/v1 "]
)
def test_urls_are_taken_with_or_without_v1(url: str) -> None:
    assert base_url(url) == "http://h:1"


async def test_the_first_listed_model_is_taken(server: FakeOpenAIServer) -> None:
    server.listed = ["first", "second"]
    assert await find_model(open_client(server.url, None)) == "first"


async def test_a_server_that_lists_no_models_requires_the_model_flag(server: FakeOpenAIServer) -> None:
    server.listed = []
    with pytest.raises(TargetError, match="--model"):
        await find_model(open_client(server.url, None))


async def test_an_unreachable_server_is_named() -> None:
    url = free_url()
    with pytest.raises(TargetError, match=url.rpartition(":")[2]):
        await ServerUnderTest.connect(TargetOptions(url))


@pytest.mark.parametrize(("model", "form"), [("good", "ids"), ("text-only", "text")])
async def test_prompts_are_sent_as_ids_if_the_server_accepts_them(
    server: FakeOpenAIServer, model: str, form: str
) -> None:
    bench = await ServerUnderTest.connect(TargetOptions(server.url, model=model))
    assert bench.prompt_form == form
    await bench.close()


async def test_words_are_measured_by_the_servers_own_tokenizer(server: FakeOpenAIServer) -> None:
    http = open_client(server.url, None)
    assert await measure_tokens_per_word(http, "good") == 2.0
    bench = await ServerUnderTest.connect(TargetOptions(server.url, model="text-only"))
    body = bench.client.body(BenchRequest((Segment("a", 100),), 1))
    assert len(body["prompt"].split()) == 50
    await bench.close()


async def test_the_api_key_is_sent(server: FakeOpenAIServer) -> None:
    bench = await ServerUnderTest.connect(TargetOptions(server.url, api_key="secret"))
    await bench.warm_up(1, 1, 10, 2)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    await bench.close()


async def test_a_failing_warm_up_ends_the_run(server: FakeOpenAIServer) -> None:
    bench = await ServerUnderTest.connect(TargetOptions(server.url, model="error-midway"))
    with pytest.raises(TargetError, match="the worker died"):
        await bench.warm_up(1, 1, 10, 4)
    await bench.close()
