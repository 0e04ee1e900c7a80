from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.client import OpenAIClient, RequestTemplate
from deploy.evaluation.bench.clock import SystemClock
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.records import BenchRequest, Segment
from deploy.evaluation.bench.transport import HttpClient
from tests.fakes.openai_server import free_url

if TYPE_CHECKING:
    from deploy.evaluation.bench.records import RequestRecord
    from tests.fakes.openai_server import FakeOpenAIServer

SEGMENTS = (Segment("system", 30, role="system"), Segment("question", 10))
REQUEST = BenchRequest(SEGMENTS, output_tokens=8, user="ann")


async def send(url: str, model: str, endpoint: str = "completions", timeout_s: float = 10.0) -> RequestRecord:
    http = HttpClient(url)
    options = RequestTemplate(model, endpoint, timeout_s=timeout_s)
    prompts = PromptMaker(as_ids=endpoint == "completions")
    try:
        return await OpenAIClient(http, prompts, options, SystemClock()).send(REQUEST)
    finally:
        await http.aclose()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_good_answer_is_recorded_with_usage_and_times(server: FakeOpenAIServer, endpoint: str) -> None:
    record = await send(server.url, "good", endpoint)
    assert record.error is None
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (40, 8, 0)
    assert len(record.chunks_s) == 8
    assert record.started_s < record.chunks_s[0] <= record.chunks_s[-1] <= record.ended_s


async def test_the_request_body_has_the_fields_that_servers_expect(server: FakeOpenAIServer) -> None:
    await send(server.url, "good")
    await send(server.url, "good", "chat")
    completion, chat = server.bodies
    assert len(completion["prompt"]) == 40
    assert all(isinstance(token, int) for token in completion["prompt"])
    assert [message["role"] for message in chat["messages"]] == ["system", "user"]
    for body in (completion, chat):
        assert body["max_tokens"] == 8
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"] is True
        assert body["user"] == "ann"


def test_extra_fields_take_precedence_and_the_user_goes_into_its_configured_field() -> None:
    options = RequestTemplate("m", user_field="cache_salt", ignore_eos=False, extra_body={"temperature": 1.5})
    client = OpenAIClient(HttpClient("http://127.0.0.1:1"), PromptMaker(), options, SystemClock())
    body = client.body(REQUEST)
    assert (body["cache_salt"], body["temperature"]) == ("ann", 1.5)
    assert "user" not in body
    assert "ignore_eos" not in body


async def test_without_usage_chunks_are_counted_and_marked_as_such(server: FakeOpenAIServer) -> None:
    record = await send(server.url, "no-usage")
    assert record.error is None
    assert record.counted_by_chunks
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (40, 8, None)


async def test_an_empty_first_chunk_is_no_first_token(server: FakeOpenAIServer) -> None:
    server.chunk_interval_s = 0.05
    record = await send(server.url, "opens-with-empty-chunk")
    assert len(record.chunks_s) == 8
    assert record.time_to_first_s is not None
    assert record.time_to_first_s >= 0.045


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("overloaded", "http_429", "come back later"),
        ("unheard-of", "http_404", "no model"),
        ("error-midway", "stream_error", "the worker died"),
        ("breaks-off", "disconnect", "connection lost"),
        ("no-done", "truncated", "without a finish"),
        ("not-json", "stream_error", "not JSON"),
    ],
)
async def test_failures_are_records_of_their_kind(
    server: FakeOpenAIServer, model: str, kind: str, message: str
) -> None:
    record = await send(server.url, model)
    assert record.error == kind
    assert message in record.message


async def test_a_stalled_server_times_out_and_its_earlier_chunks_are_kept(server: FakeOpenAIServer) -> None:
    records: list[RequestRecord] = []
    while not records or not records[-1].chunks_s:  # a busy machine may take that long for the first chunk, too
        records.append(await send(server.url, "stalls", timeout_s=1.0))
    assert {record.error for record in records} == {"timeout"}
    assert len(records[-1].chunks_s) == 1


async def test_no_server_is_a_record_too() -> None:
    assert (await send(free_url(), "good")).error == "connect"
