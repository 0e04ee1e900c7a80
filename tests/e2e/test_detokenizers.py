"""Two tokenizers and two detokenizers: both are used, and none of either can be missed by a client."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from common.errors import ConfigurationError
from common.settings import (
    DetokenizerSettings,
    GatewaySettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    TokenizerSettings,
)
from deploy.supervisor.layout import Replicas, check_port, free_port
from tests.e2e.conftest import fake_steps, serve
from tests.e2e.test_restarts import kill_and_wait_until_replaced, serves
from tests.gateway.support import events
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

STREAMS, TOKENS, STEP_MS = 12, 300, 10
METRICS = {"tokenizer": "pando_tokenizer_requests_total", "detokenizer": "pando_detokenizer_tokens_total"}


def free_pair() -> int:
    """Return the first of two consecutive ports that are both free."""
    while True:
        first = free_port("127.0.0.1")
        with contextlib.suppress(ConfigurationError):
            check_port("127.0.0.1", first + 1)
            return first


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    """The first of two consecutive ports for the metrics of each service."""
    return {name: free_pair() for name in METRICS}


@pytest.fixture(scope="module")
def two_of_each(run_root: Path, ports: dict[str, int]) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        tokenizer=TokenizerSettings(metrics_port=ports["tokenizer"]),
        detokenizer=DetokenizerSettings(metrics_port=ports["detokenizer"]),
        scheduler=SchedulerSettings(max_rows=32),
    )
    with fake_steps(STEP_MS):
        yield from serve(settings, run_root, replicas=Replicas(tokenizers=2, detokenizers=2))


def counted(ports: dict[str, int], service: str) -> list[float]:
    """Return the counter of each of the service's processes."""
    values = []
    for number in range(2):
        text = httpx.get(f"http://127.0.0.1:{ports[service] + number}/metrics", trust_env=False, timeout=30).text
        values.append(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(METRICS[service])))
    return values


def stream(served: Served, seed: int, received: list[str]) -> str:
    """Return the text of a stream whose events are noted in `received`; fail if it ends early."""
    body = {"model": served.model, "prompt": "Hi", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
            "seed": seed, "temperature": 1, "user": f"user-{seed}"}  # fmt: skip
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=300, trust_env=False) as answer:
        assert answer.status_code == httpx.codes.OK
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            received.append(line)
    sent = list(events("".join(f"{line}\n" for line in lines)))
    assert sent[-1] == "[DONE]"
    parts = [json.loads(event) for event in sent[:-1]]
    choices = [choice for part in parts for choice in part["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return "".join(choice["text"] for choice in choices)


def test_requests_are_distributed_over_both_of_each(two_of_each: Served, ports: dict[str, int]) -> None:
    wait_until(lambda: serves(two_of_each), 120)
    before = {service: counted(ports, service) for service in METRICS}
    for number in range(20):
        two_of_each.complete(f"{number}", max_tokens=4)
    for service, counts in before.items():
        added = [now - then for now, then in zip(counted(ports, service), counts, strict=True)]
        # Turns are taken, but a service that is slow to report its health misses some.
        assert min(added) >= sum(added) / 4 > 0, (service, added)


@pytest.mark.parametrize("name", ["detokenizer-0", "tokenizer-1"])
def test_nothing_is_lost_when_one_is_killed_in_mid_stream(two_of_each: Served, name: str) -> None:
    wait_until(lambda: serves(two_of_each), 120)
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = list(pool.map(lambda seed: stream(two_of_each, seed, []), range(STREAMS)))
        assert len(set(undisturbed)) == STREAMS
        received: list[list[str]] = [[] for _ in range(STREAMS)]
        running = [pool.submit(stream, two_of_each, seed, received[seed]) for seed in range(STREAMS)]
        wait_until(lambda: all(len(lines) > 10 for lines in received), 120)
        kill_and_wait_until_replaced(two_of_each, name)
        assert [each.result(300) for each in running] == undisturbed
    wait_until(two_of_each.is_idle, timeout_s=120, what=lambda: str(two_of_each.state(include_requests=True)))
