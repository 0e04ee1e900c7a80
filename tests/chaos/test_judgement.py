"""The campaign counts what clients lost, what differs from an undisturbed run, and when it has failed."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.faults import all_faults
from tests.chaos.links import HOST
from tests.chaos.load import DONE, Case, ChoiceOutput, Client, Exchange, Shape, StreamError
from tests.chaos.report import exit_code, row, summary, warnings_in
from tests.chaos.rounds import Judgement, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

CASE = Case("text", "/v1/completions", {"model": "tiny"})
TOKENS = (5, 6, 7)
CLEAN = Outcome("one/none", 10, 0, 0, 0, 0.5, 1.0, 2.0, 30.0)


def chunk(index: int, token: int, logprob: float = -1.0) -> dict[str, Any]:
    logprobs = {"tokens": ["x"], "token_logprobs": [logprob], "top_logprobs": [{"x": logprob, "y": -3.0}]}
    choice = {"index": index, "text": f" {token}", "token_ids": [token], "logprobs": logprobs, "finish_reason": None}
    return {"choices": [choice]}


def answer(tokens: Sequence[int] = TOKENS, logprob: float = -1.0) -> Exchange:
    exchange = Exchange(CASE)
    for token in tokens:
        exchange.add(chunk(0, token, logprob))
    exchange.add({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    exchange.add({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": len(tokens)}})
    exchange.event_ids = [f"record/{number}" for number in range(4, 6 + len(tokens))]
    return exchange


def judge(exchange: Exchange, reconnects: int = 0) -> Judgement:
    judgement = Judgement()
    judgement.add(exchange, answer(), reconnects)
    return judgement


def test_an_answer_equal_to_the_undisturbed_one_is_right() -> None:
    assert judge(answer()) == Judgement()


@pytest.mark.parametrize(
    ("exchange", "problem"),
    [
        (answer((5, 6, 8)), "another token 2"),
        (answer((5, 6)), "2 tokens instead of 3"),
        (answer(logprob=-1.1), "another log probability of token 0"),
        (replace(answer(), event_ids=["record/4", "record/6"]), "an event is missing or came twice"),
        (replace(answer(), usage=(2, 4)), "usage (2, 4) instead of (2, 3)"),
    ],
)
def test_an_answer_that_differs_is_wrong(exchange: Exchange, problem: str) -> None:
    judgement = judge(exchange)
    assert judgement.wrong == [f"wrong: text: {problem}"]
    assert not judgement.lost


def test_a_request_is_lost_that_failed_or_broke_more_often_than_its_fault_may_break_it() -> None:
    assert judge(replace(answer(), failure="status 503")).lost == ["lost: text: status 503"]
    assert judge(replace(answer(), reconnects=1)).lost == ["lost: text: its connection broke 1 times"]
    assert judge(replace(answer(), reconnects=1), reconnects=1) == Judgement()


@pytest.mark.parametrize("changes", [{"lost": 1}, {"wrong": 1}, {"leaked": 1}])
def test_the_exit_code_is_that_of_the_worst_fault(changes: dict[str, Any]) -> None:
    failed = replace(CLEAN, **changes)
    assert exit_code([CLEAN, CLEAN], strict_pauses=True) == 0
    assert exit_code([CLEAN, failed], strict_pauses=False) == 1
    assert "FAILED" in row(failed)


def test_long_pauses_are_reported_and_decide_only_on_demand() -> None:
    slow = replace(CLEAN, pause_max_s=2.5)
    assert exit_code([CLEAN, slow], strict_pauses=False) == 0
    assert exit_code([CLEAN, slow], strict_pauses=True) == 1
    assert "slow" in row(slow)
    assert "pauses above the goal: one/none" in summary([slow])


def test_a_campaign_without_faults_has_shown_nothing() -> None:
    assert exit_code([], strict_pauses=False) == 1


def test_names_of_faults_are_unique_and_each_setting_has_a_short_one() -> None:
    faults = all_faults()
    assert len({fault.name for fault in faults}) == len(faults) > 100
    assert {fault.setting for fault in faults if fault.is_short} == {fault.setting for fault in faults}


MESSAGE = {"content": [{"type": "text", "text": "Hello"}], "stop_reason": "end_turn"}
MESSAGE_EVENTS = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 0}}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hel"}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
]
RESPONSE_EVENTS = [
    {"type": "response.created", "response": {"status": "in_progress", "error": None}},
    {"type": "response.output_text.delta", "delta": "Hel"},
    {"type": "response.output_text.delta", "delta": "lo"},
    {"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 2}}},
]
OUTPUT = ChoiceOutput(text="Hello", finish="end_turn")


@pytest.mark.parametrize(
    ("events", "output", "usage"),
    [
        (MESSAGE_EVENTS, OUTPUT, (0, 2)),
        ([{"type": "message", **MESSAGE, "usage": {"input_tokens": 3, "output_tokens": 2}}], OUTPUT, (0, 2)),
        (RESPONSE_EVENTS, replace(OUTPUT, finish="response.completed"), (3, 2)),
        (
            [
                {
                    "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
                }
            ],
            replace(OUTPUT, finish="stop"),
            (3, 2),
        ),
        (
            [{"data": [{"index": 0, "embedding": [0.5, -0.5]}], "usage": {"prompt_tokens": 3, "total_tokens": 3}}],
            ChoiceOutput(logprobs=[(0.5, -0.5)]),
            (3, 0),
        ),
        (
            [{"text": "Hello", "meta_info": {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": None}}],
            replace(OUTPUT, finish="null"),
            (3, 2),
        ),
    ],
)
def test_answers_of_all_kinds_are_taken_in(
    events: list[dict[str, Any]], output: ChoiceOutput, usage: tuple[int, int]
) -> None:
    exchange = Exchange(CASE)
    for event in events:
        exchange.add(event)
    assert exchange.choices == {0: output}
    assert exchange.usage == usage


@pytest.mark.parametrize(
    "event",
    [{"type": "error", "message": "gone"}, {"type": "response.failed", "response": {}}, {"error": {"message": "gone"}}],
)
def test_an_event_that_is_an_error_fails_the_request(event: dict[str, Any]) -> None:
    with pytest.raises(StreamError):
        Exchange(CASE).add(event)


def test_a_user_is_named_in_each_shape() -> None:
    assert CASE.body_of("ann") == {"model": "tiny", "user": "ann"}
    assert replace(CASE, shape=Shape.MESSAGES).body_of("ann") == {"model": "tiny", "metadata": {"user_id": "ann"}}
    batch = replace(CASE, body={"lines": [{"prompt": "Hi"}]}, shape=Shape.BATCH)
    [line] = map(json.loads, batch.lines_of("ann").splitlines())
    assert line["body"] == {"prompt": "Hi", "user": "ann"}


@asynccontextmanager
async def gateway(*connections: tuple[list[str], bool]) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve one connection after the other: events with ids, then an orderly end or a reset; yield URL and requests."""
    requests: list[str] = []
    waiting = list(connections)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        events, is_whole = waiting.pop(0)
        first = sum(len(served) for served, _ in connections[: len(connections) - len(waiting) - 1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number, data in enumerate(events, first):
            event = f"id: record/{number}\ndata: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
        if is_whole:
            writer.write(b"0\r\n\r\n")
        else:
            writer.transport.abort() if not events else None
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()


async def test_a_client_continues_a_broken_stream_after_its_last_event() -> None:
    whole = [json.dumps(chunk(0, token)) for token in TOKENS]
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
    async with gateway((whole[:2], False), ([*whole[2:], usage, DONE], True)) as (url, requests):
        client = Client(url)
        exchange = Exchange(CASE)
        await client.exchange(exchange, "somebody")
        await client.close()
    assert exchange.failure is None
    assert exchange.reconnects == 1
    assert exchange.choices[0].token_ids == list(TOKENS)
    assert exchange.events == [0, 1, 2, 3, 4]
    assert "last-event-id: record/1" in requests[1]
    assert "last-event-id" not in requests[0]


async def test_a_client_continues_a_response_in_the_background_by_its_number() -> None:
    events = [json.dumps(event) for event in RESPONSE_EVENTS]
    async with gateway((events[:2], False), (events[2:], True)) as (url, requests):
        client = Client(url)
        exchange = Exchange(Case("background", "/v1/responses", {"background": True}))
        await client.exchange(exchange, "somebody")
        await client.close()
    assert exchange.failure is None
    assert exchange.choices[0].text == "Hello"
    assert requests[1].startswith("get /v1/responses/record?stream=true&starting_after=1 ")


async def test_a_client_counts_an_error_in_the_stream_as_its_end() -> None:
    error = json.dumps({"error": {"message": "the worker is away"}})
    async with gateway(([json.dumps(chunk(0, 5)), error, DONE], True)) as (url, _):
        client = Client(url)
        exchange = Exchange(CASE)
        await client.exchange(exchange, "somebody")
        await client.close()
    assert exchange.failure == "error in the stream: the worker is away"


def test_the_services_warnings_are_shown_once_with_their_number() -> None:
    lines = [
        'gateway: {"level": "error", "event": "state.away", "reason": "one"}\n',
        'gateway: {"level": "info", "event": "request.finished"}\n',
        'gateway: {"level": "error", "event": "state.away", "reason": "two"}\n',
        'worker: {"level": "warning", "event": "slow"}\n',
        "pando: fault one/kill\n",
        "worker: [1]\n",
    ]
    first, second = warnings_in(lines)
    assert first == 'gateway: state.away x2: {"level": "error", "event": "state.away", "reason": "two"}'
    assert second.startswith("worker: slow x1: ")
