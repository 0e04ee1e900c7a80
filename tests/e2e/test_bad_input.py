"""What is wrong is refused with the right status and a message that helps, and disturbs nobody."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.served import Served

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "messages is no list": ({"messages": "Hi"}, 400, "messages"),
    "no messages": ({"messages": []}, 400, "messages"),
    "a message without a role": ({"messages": [{"content": "Hi"}]}, 400, "role"),
    "max_tokens is text": ({"max_tokens": "many"}, 400, "max_tokens"),
    "max_tokens is negative": ({"max_tokens": -1}, 400, "max_tokens"),
    "max_tokens beyond the context": ({"max_tokens": 10_000_000}, 400, "context length"),
    "temperature is negative": ({"temperature": -0.5}, 400, "temperature"),
    "top_p above one": ({"top_p": 1.5}, 400, "top_p"),
    "n is zero": ({"n": 0}, 400, "n"),
    "a model that is not served": ({"model": "gpt-17"}, 404, "gpt-17"),
    "a prompt longer than the context": (
        {"messages": [{"role": "user", "content": "word " * 20_000}]},
        400,
        "context length",
    ),
}


@pytest.mark.parametrize(("changes", "status", "hint"), CASES.values(), ids=CASES.keys())
def test_a_bad_request_is_refused_in_the_shape_that_clients_know(
    served: Served, changes: dict[str, Any], status: int, hint: str
) -> None:
    with served.leaving_nothing_behind(), served.http() as http:
        answer = http.post("/v1/chat/completions", json={"model": served.model, **GOOD, **changes})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert hint in f"{error['message']} {error['param']}"
    assert "x-request-id" in answer.headers


def test_broken_json_is_refused(served: Served) -> None:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", content=b'{"model": ', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_body_of_10_mb_is_refused_and_the_server_stays_healthy(served: Served) -> None:
    body = json.dumps({"model": served.model, "messages": [{"role": "user", "content": "x" * 10_000_000}]})
    with served.leaving_nothing_behind(), served.http() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 413)
        assert answer.json()["error"]["message"]
    assert "Paris" in served.complete()


def test_bad_requests_do_not_disturb_a_concurrent_request(served: Served) -> None:
    expected = served.complete("Once upon a time", max_tokens=60, user="undisturbed")
    result: list[str] = []
    good = threading.Thread(
        target=lambda: result.append(served.complete("Once upon a time", max_tokens=60, user="undisturbed-2"))
    )
    good.start()
    with served.http() as http:
        for changes, status, _ in CASES.values():
            answer = http.post("/v1/chat/completions", json={"model": served.model, **GOOD, **changes})
            assert answer.status_code == status
    good.join()
    assert result == [expected]
