"""Open sessions and priorities through all services, on memory that holds little more than one of them needs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from common.settings import Settings
from tests.e2e.conftest import fake_steps, serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

PAGE = 16
# A model that makes tokens up: the same ones for the same tokens before them.
SETTINGS = {
    "model": {"load_format": "fake"},
    "gateway": {"port": 0},
    "worker": {"threads": 1},
    "scheduler": {
        "device_pages": 96,
        "max_rows": 2,
        "queue": {"policy": "priority"},
        "sessions": {"limit": 2, "share": 0.25},
        "max_steps_per_plan": 4,
    },
}
# Of a session's 24 pages.
PROMPT = list(range(1000, 1000 + 12 * PAGE))


@pytest.fixture(scope="module")
def small(run_root: Path) -> Iterator[Served]:
    with fake_steps(5.0):
        yield from serve(Settings.model_validate(SETTINGS), run_root)


@pytest.fixture
def http(small: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, timeout=60) as client:
        yield client


def generate(http: httpx.Client, ids: list[int], tokens: int = 8, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, "sampling_seed": 1}
    response = http.post("/generate", json={"input_ids": ids, "sampling_params": params, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def flood(http: httpx.Client) -> None:
    """Use all pages for strangers' prompts."""
    for stranger in range(4):
        generate(http, [2000 + stranger * 500 + i for i in range(40 * PAGE)], 1, user_id=f"stranger-{stranger}")


def state(http: httpx.Client) -> dict[str, Any]:
    return dict(http.get("/get_server_info").json()["internal_states"][0])


def open_session(http: httpx.Client, **fields: Any) -> str:
    response = http.post("/open_session", json=fields)
    assert response.status_code == 200, response.text
    return str(response.json())


def test_a_session_s_second_turn_is_cached_although_a_flood_evicted_all_else(http: httpx.Client) -> None:
    session = open_session(http)
    first = generate(http, PROMPT, session_params={"id": session})
    alone = generate(http, [token + 300 for token in PROMPT], user_id="alone")
    flood(http)
    params = {"id": session, "rid": first["meta_info"]["id"]}
    second = generate(http, [7, 8, 9], session_params=params)
    again = generate(http, [*(token + 300 for token in PROMPT), *alone["output_ids"], 7, 8, 9], user_id="alone")
    whole = len(PROMPT) + 8
    assert second["meta_info"]["prompt_tokens"] == whole + 3
    assert second["meta_info"]["cached_tokens"] == (whole - 1) // PAGE * PAGE
    assert again["meta_info"]["cached_tokens"] == 0
    # The same tokens as without a session.
    unpinned = generate(http, [*PROMPT, *first["output_ids"], 7, 8, 9], user_id="other")
    assert second["output_ids"] == unpinned["output_ids"]
    (shown,) = state(http)["sessions"]
    assert (shown["turns"], shown["pinned_tokens"]) == ("2", (whole + 3 + 7) // PAGE * PAGE)
    assert http.post("/close_session", json={"session_id": session}).status_code == 200
    assert not state(http)["sessions"]
    # Nobody continues what was closed.
    refused = http.post("/generate", json={"input_ids": [1], "session_params": params})
    assert refused.status_code == 400
    assert "is not open" in refused.json()["error"]["message"]


def test_a_conversation_keeps_its_session_under_its_user(http: httpx.Client, small: Served) -> None:
    session = open_session(http, user_id="ann")
    fields = {"model": small.model, "max_tokens": 4, "user": "ann", "session_id": session}
    messages = [{"role": "user", "content": "word " * 150}]
    first = http.post("/v1/chat/completions", json={"messages": messages, **fields}).json()
    flood(http)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = http.post("/v1/chat/completions", json={"messages": messages, **fields}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
    # Bob has no such session.
    foreign = http.post("/close_session", json={"session_id": session, "user_id": "bob"})
    assert foreign.status_code == 400
    assert http.post("/close_session", json={"session_id": session, "user_id": "ann"}).status_code == 200


def test_time_ends_a_session_and_quotas_refuse(http: httpx.Client) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}, "user_id": "carl"}
    while True:  # on a busy machine, a session may have ended before its first request
        session = open_session(http, timeout=3.0, user_id="carl")
        if http.post("/generate", json={**body, "session_params": {"id": session}}).status_code == httpx.codes.OK:
            break
    wait_until(lambda: not state(http)["sessions"])
    opened = [open_session(http, user_id="dora") for _ in range(2)]
    third = http.post("/open_session", json={"user_id": "dora"})
    assert third.status_code == 429
    assert "retry-after" in third.headers
    assert "of which 2 may be" in third.json()["error"]["message"]
    large = http.post("/open_session", json={"user_id": "emil", "capacity_of_str_len": 24 * PAGE + 1})
    assert large.status_code == 400
    assert f"may hold {24 * PAGE} tokens here" in large.json()["error"]["message"]
    full = {"input_ids": [5] * (24 * PAGE + 1), "session_params": {"id": opened[0]}, "user_id": "dora"}
    assert http.post("/generate", json=full).status_code == 400
    for session in opened:
        http.post("/close_session", json={"session_id": session, "user_id": "dora"})
    # Nothing is left behind.
    http.post("/flush_cache")
    assert state(http)["tiers"][0]["free_pages"] == "96"


def test_an_urgent_request_preempts_running_ones_which_then_continue(http: httpx.Client) -> None:
    prompts = [[3000 + 100 * number + i for i in range(2 * PAGE)] for number in range(2)]
    undisturbed = [generate(http, prompt, 400, user_id="before")["output_ids"] for prompt in prompts]
    answers: dict[int, dict[str, Any]] = {}
    ends: list[object] = []

    def ask(number: int) -> None:
        answers[number] = generate(http, prompts[number], 400, user_id=f"patient-{number}")
        ends.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: state(http)["running_rows"] == 2)
    urgent = generate(http, [11] * PAGE, 4, user_id="urgent", priority=5)
    ends.append("urgent")
    for thread in threads:
        thread.join()
    assert urgent["meta_info"]["completion_tokens"] == 4
    assert ends[0] == "urgent"
    assert [answers[number]["output_ids"] for number in range(2)] == undisturbed
    assert state(http)["preemptions"] == "1"
