from __future__ import annotations

import itertools

import orjson
import pytest

from deploy.evaluation.bench.client import AnswerReader, error_message


def read(*events: object) -> AnswerReader:
    seconds = itertools.count(1)
    reader = AnswerReader(lambda: float(next(seconds)))
    for event in events:
        payload = event if isinstance(event, bytes) else orjson.dumps(event)
        reader.feed(b"data: " + payload + b"\n\n")
    return reader


def chat(content: str | None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}, **more}]}


def test_output_begins_with_text_and_not_with_the_role() -> None:
    reader = read({"choices": [{"delta": {"role": "assistant"}}]}, chat(""), chat("a"), chat("b"), b"[DONE]")
    assert reader.output_times() == (3.0, 4.0)
    assert reader.text == ["a", "b"]


def test_tokens_without_text_still_have_a_first_time() -> None:
    reader = read({"choices": [{"text": ""}]}, {"choices": [], "usage": {"completion_tokens": 3}})
    assert reader.output_times() == (1.0,)


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_reasoning_is_output_too(field: str) -> None:
    assert read({"choices": [{"delta": {field: "x"}}]}).output_times() == (1.0,)


def test_tool_calls_are_output_too() -> None:
    assert read({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}).output_times() == (1.0,)


def test_counts_come_from_usage_and_not_from_chunks() -> None:
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": details}
    reader = read(chat("a"), chat("bcd", finish_reason="stop"), {"choices": [], "usage": usage})
    assert (reader.input_tokens, reader.output_tokens, reader.cached_tokens) == (10, 7, 4)
    assert reader.finished


def test_usage_without_details_leaves_cached_tokens_unknown() -> None:
    reader = read(
        {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": None}}
    )
    assert reader.cached_tokens is None


def test_timings_of_llama_server_replace_missing_usage() -> None:
    reader = read(chat("a"), {"choices": [], "timings": {"cache_n": 5, "prompt_n": 7, "predicted_n": 1}})
    assert (reader.input_tokens, reader.output_tokens, reader.cached_tokens) == (12, 1, 5)


def test_a_stream_is_finished_by_done_or_by_a_finish_reason() -> None:
    assert not read(chat("a")).finished
    assert read(chat("a"), b"[DONE]").finished
    assert read(chat("a", finish_reason="length")).finished


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "gone"}}, "gone"),
        ({"error": "gone"}, "gone"),
        (b"{half", "not JSON"),
        (b"[1]", "not an object"),
    ],
)
def test_errors_in_the_stream_are_noted(event: object, message: str) -> None:
    error = read(chat("a"), event).error
    assert error is not None
    assert message in error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "m", "code": 1}}, "m"),
        ({"detail": "d"}, "d"),
        ({"error": "e"}, "e"),
        ({"message": "vllm", "object": "error"}, "vllm"),
        ("text", "text"),
    ],
)
def test_error_bodies_of_several_servers_are_understood(body: object, message: str) -> None:
    assert error_message(body) == message
