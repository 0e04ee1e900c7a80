"""Speculative decoding with all services: the same texts as without, also when services are killed in between."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from common.settings import GatewaySettings, SchedulerSettings, Settings, SpeculationSettings
from deploy.supervisor.layout import free_port
from tests.e2e.conftest import require_model, serve
from tests.e2e.test_restarts import kill_and_wait_until_replaced
from tests.gateway.support import events
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

NOTES = """The harbour opened in 1874 and was widened twice, in 1902 and in 1931. Its three cranes lift 12, 20 and 45
tonnes. Ships with a draught of more than nine metres wait for the tide at the outer buoy."""
STATION = {
    "type": "object",
    "properties": {"station": {"type": "string", "maxLength": 12}, "temperature_celsius": {"type": "integer"}},
    "required": ["station", "temperature_celsius"],
    "additionalProperties": False,
}
STATIONS = {"type": "array", "items": STATION, "minItems": 4, "maxItems": 6}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "stations", "schema": STATIONS, "strict": True}}
REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Repeat this text word for word:\n\n{NOTES}"}], "temperature": 0},
    {"messages": [{"role": "user", "content": f"Repeat this text:\n\n{NOTES}"}], "temperature": 0.7, "seed": 5},
    {"messages": [{"role": "user", "content": "List stations."}], "response_format": SCHEMA, "temperature": 0},
    {
        "messages": [{"role": "user", "content": "List stations."}], "response_format": SCHEMA, "temperature": 0.9,
        "seed": 3, "frequency_penalty": 0.2,
    },
    {"messages": [{"role": "user", "content": "Count to 100."}], "temperature": 0.3, "seed": 2, "logprobs": True},
]  # fmt: skip
TOKENS = 80


@pytest.fixture(scope="module")
def expected(run_root: Path) -> list[tuple[str, str]]:
    """Texts and finish reasons without drafts, of one request after the other."""
    require_model()
    scheduler = SchedulerSettings(speculation=SpeculationSettings(method="off"), max_rows=1)
    settings = Settings(gateway=GatewaySettings(port=0, anonymous="vouched"), scheduler=scheduler)
    with contextmanager(serve)(settings, run_root) as served:
        return [ask(served, request) for request in REQUESTS]


@pytest.fixture(scope="module")
def drafting(run_root: Path) -> Iterator[Served]:
    require_model()
    scheduler = SchedulerSettings(
        speculation=SpeculationSettings(method="ngram"), metrics_port=free_port("127.0.0.1"), device_pages=200
    )
    yield from serve(Settings(gateway=GatewaySettings(port=0, anonymous="vouched"), scheduler=scheduler), run_root)


def ask(served: Served, request: dict[str, Any]) -> tuple[str, str]:
    """Return the text and the finish reason of a streamed answer."""
    body = {"model": served.model, "max_tokens": TOKENS, "stream": True, **request}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=300) as answer:
        sent = list(events("".join(f"{line}\n" for line in answer.iter_lines())))
    assert sent[-1] == "[DONE]", sent[-1]
    choices = [choice for event in sent[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return text, reason


def accepted(served: Served) -> float:
    """Return how many tokens of drafts were accepted since the scheduler started."""
    port = served.deployment.layout.find("scheduler").settings.scheduler.metrics_port
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=30).text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("pando_scheduler_accepted_draft_tokens ")]
    return float(value)


@pytest.mark.slow
def test_answers_are_those_without_drafts(expected: list[tuple[str, str]], drafting: Served) -> None:
    assert len(expected) == len(REQUESTS)
    for _ in range(2):
        # The second time, what the cache holds is drafted.
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            assert list(pool.map(lambda request: ask(drafting, request), REQUESTS)) == expected
    # The scheduler renews its metrics every second or so.
    wait_until(lambda: accepted(drafting) > 50, what=lambda: f"{accepted(drafting)} accepted tokens")
    assert drafting.state().jumped_tokens > 10


def charged(served: Served) -> tuple[int, int]:
    """Return the forced and the drafted tokens in the ledger."""
    [use] = httpx.get(f"{served.url}/v1/usage", params={"limit": 1}, trust_env=False, timeout=30).json()["data"]
    return use["forced_tokens"], use["drafted_tokens"]


def counted(served: Served) -> tuple[int, int]:
    """Return the tokens that the scheduler counted as forced, and as drafted and accepted."""
    return served.state().jumped_tokens, int(accepted(served))


def test_the_ledger_has_the_engine_s_counts_of_forced_and_drafted_tokens(drafting: Served) -> None:
    """Without kills: the engine computes some tokens twice if it has to begin again."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        list(pool.map(lambda request: ask(drafting, request), REQUESTS))
    wait_until(
        lambda: charged(drafting) == counted(drafting),
        what=lambda: f"equal counts: {charged(drafting)} in the ledger, {counted(drafting)} by the engine",
    )
    assert min(charged(drafting)) > 10


@pytest.mark.extended
def test_answers_stay_the_same_when_services_are_killed(expected: list[tuple[str, str]], drafting: Served) -> None:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        for name in ("worker", "scheduler", "detokenizer"):
            asked = [pool.submit(ask, drafting, request) for request in REQUESTS]
            wait_until(lambda: drafting.state().running_rows > 1, timeout_s=120)
            kill_and_wait_until_replaced(drafting, name)
            assert [one.result(timeout=300) for one in asked] == expected
            wait_until(drafting.is_idle, timeout_s=120)
