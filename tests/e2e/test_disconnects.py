"""A client that goes away gives back its row and its pages, whatever its request was doing."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.e2e.served import Served

# A dozen seconds of prefill and more on two cores, in steps of 512 tokens.
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 700
CHUNKS = 14
# Long beyond what a test waits.
MANY_TOKENS = 6000


def phases(served: Served) -> set[str]:
    return {request.phase for request in served.state(include_requests=True).requests}


def send(served: Served, body: dict[str, object]) -> socket.socket:
    """Send a completion request and return its connection at once; HTTP clients wait for the answer's head."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_gone_in_the_middle_of_prefill_frees_everything(served: Served, stream: bool) -> None:
    wait_until(served.is_idle, timeout_s=120)
    # A user of its own, or the second run would find the first one's prefix.
    body = {"model": served.model, "prompt": LONG_PROMPT, "max_tokens": 50, "stream": stream, "user": f"gone-{stream}"}
    with served.leaving_nothing_behind():
        before = served.state().finished_steps
        with send(served, body):
            wait_until(lambda: "PREFILL" in phases(served), timeout_s=120)
        wait_until(lambda: not phases(served), timeout_s=120)
        # The chunk that is being computed is finished first; the rest of the prompt never is.
        assert served.state().finished_steps - before < CHUNKS


def test_a_client_gone_in_the_middle_of_decode_frees_everything(served: Served) -> None:
    wait_until(served.is_idle, timeout_s=120)
    body = {
        "model": served.model,
        "prompt": "Once upon a time",
        "max_tokens": MANY_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    with served.leaving_nothing_behind(), served.http() as http:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(10):
                next(lines)
            assert "DECODE" in phases(served)
        wait_until(lambda: not phases(served), timeout_s=120)


def test_a_client_that_does_not_stream_frees_everything_too(served: Served) -> None:
    wait_until(served.is_idle, timeout_s=120)
    body = {"model": served.model, "prompt": "Once upon a time", "max_tokens": MANY_TOKENS, "ignore_eos": True}
    with served.leaving_nothing_behind():
        # The timeout is how this client goes away.
        with served.http() as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=httpx.Timeout(10, read=1.0))
        wait_until(lambda: not phases(served), timeout_s=120)


def test_the_server_still_answers_after_many_disconnects(served_fake: Served) -> None:
    body = {"model": served_fake.model, "prompt": "Hello", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with served_fake.leaving_nothing_behind(), served_fake.http() as http:
        for _ in range(40):
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
    assert served_fake.complete("Hello", max_tokens=5)
