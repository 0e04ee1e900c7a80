"""The official client against a gateway that really listens."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import openai
import pytest

from common.deltas import Delta
from common.types import ErrorCode, Finish, FinishReason, RequestFailure
from tests.fakes.pipeline import logprob, rejects, says
from tests.gateway.listening import listening
from tests.gateway.support import FakedGateway, faked, gateway_saying

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event


@asynccontextmanager
async def sdk(gateway: FakedGateway, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening(gateway) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=max_retries) as client:
            yield client


async def test_chat() -> None:
    async with sdk(gateway_saying("Hi", " there")) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].message.content == "Hi there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_streamed_chat_with_usage() -> None:
    async with sdk(gateway_saying("Hi", " there")) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hi there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2
    assert len({chunk.id for chunk in chunks}) == 1


async def test_accumulating_stream_helper() -> None:
    entries = [logprob("Hi", -0.5, ("Hi", -0.5)), logprob("!", -0.25, ("!", -0.25))]
    async with (
        sdk(faked(says("Hi", "!", logprobs=entries))) as client,
        client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], logprobs=True, top_logprobs=1, n=2
        ) as stream,
    ):
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hi!", "Hi!"]
    logprobs = final.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["Hi", "!"]


async def test_completion_streamed_and_whole() -> None:
    async with sdk(gateway_saying(" Paris", ".")) as client:
        whole = await client.completions.create(model="tiny", prompt="The capital of France is")
        stream = await client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == " Paris."


async def test_models() -> None:
    async with sdk(gateway_saying("x")) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).created == 1_700_000_000
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_errors_arrive_as_the_clients_own_classes() -> None:
    async with sdk(gateway_saying("x")) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="x", temperature=-1)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="x")
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    assert unknown.value.code == "model_not_found"


async def test_error_inside_a_stream_raises() -> None:
    def script(request: GenerateRequest) -> Iterable[Event]:
        yield from list(says("Hi", "there")(request))[:2]
        yield from _failing(request)

    async with sdk(faked(script)) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        assert (await anext(stream)).choices[0].text == "Hi"
        with pytest.raises(openai.APIError, match="out of order"):
            await anext(stream)


async def test_client_tries_again_when_the_queue_was_full() -> None:
    full = RequestFailure(ErrorCode.QUEUE_FULL, "full", retryable=True, retry_after_ms=10)
    gateway = faked(None)

    def script(request: GenerateRequest) -> Iterable[Event]:
        answers = rejects(full) if len(gateway.pipeline.submitted) == 1 else says("ok")
        yield from answers(request)

    gateway.pipeline.script = script
    async with sdk(gateway, max_retries=2) as client:
        answer = await client.completions.create(model="tiny", prompt="x")
    assert answer.choices[0].text == "ok"
    assert len(gateway.pipeline.submitted) == 2


async def test_the_sdk_does_not_retry_failures_that_would_repeat() -> None:
    gateway = faked(rejects(RequestFailure(ErrorCode.INTERNAL, "a defect")))
    async with sdk(gateway, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="tiny", prompt="x")
    assert len(gateway.pipeline.submitted) == 1


def _failing(request: GenerateRequest) -> list[Event]:
    error = RequestFailure(ErrorCode.INTERNAL, "the worker is out of order")
    return [Delta(request.request_id, 0, 1, (), "", finish=Finish(FinishReason.ERROR, error=error))]
