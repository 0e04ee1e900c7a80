"""The way of a request through the real services, as its owner sees it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.e2e.served import Served

WORDS = "The trees of a forest are connected by their roots. " * 12


def ask(served: Served, question: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the response and its timeline."""
    body = {"model": served.model, "messages": [{"role": "user", "content": question}], "max_tokens": 6}
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        timeline = http.get(f"/v1/requests/{answer.json()['id']}/timeline")
    timeline.raise_for_status()
    return answer.json(), timeline.json()


def test_the_phases_of_a_request_follow_each_other_and_say_what_the_cache_held(served: Served) -> None:
    ask(served, f"{WORDS} How many trees are there?")
    answer, timeline = ask(served, f"{WORDS} Which trees are there?")
    phases = {phase["name"]: phase for phase in timeline["phases"]}
    assert list(phases) == ["tokenize", "queue", "prefill", "decode", "deliver"]
    times = [timeline["received_at"], *(phase["start"] for phase in timeline["phases"]), timeline["ended_at"]]
    assert all(before <= after for before, after in pairwise(times))
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert phases["prefill"]["cached"]["tokens"] == cached > 0
    assert phases["decode"]["output_tokens"] == answer["usage"]["completion_tokens"]
    assert timeline["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
