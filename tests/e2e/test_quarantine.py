"""A request that ends the engine gets an error; streams beside it lose nothing, and the deployment serves on."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from services.scheduler.core.suspects import QUARANTINED_AFTER
from services.worker.engine.execution.fake_model import FATAL_VARIABLE
from tests.e2e.conftest import fake_steps, serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

FATAL = {"kill": [5001, 5002, 5003], "raise": [6001, 6002]}
STREAMS = 8
TOKENS = 300


@pytest.fixture(scope="module")
def fragile(run_root: Path) -> Iterator[Served]:
    """A deployment whose engine some sequences of tokens end."""
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(max_rows=32),
    )
    with pytest.MonkeyPatch.context() as patch, fake_steps(5):
        patch.setenv(FATAL_VARIABLE, ", ".join(f"{how} {' '.join(map(str, ids))}" for how, ids in FATAL.items()))
        yield from serve(settings, run_root)


def read_stream(served: Served, seed: int, begun: threading.Barrier | None = None) -> tuple[str, object, int]:
    """Return a stream's text, its finish and its number of tokens."""
    body = {"model": served.model, "prompt": f"Stream {seed}", "max_tokens": TOKENS, "ignore_eos": True, "seed": seed,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    parts = []
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):  # a comment that keeps the connection open, or the end
                continue
            parts.append(json.loads(line.removeprefix("data: ")))
            if len(parts) == 1 and begun is not None:
                begun.wait(timeout=120)
    assert not [part for part in parts if "error" in part], parts[-1]
    choices = [choice for part in parts for choice in part["choices"]]
    tokens = parts[-1]["usage"]["completion_tokens"]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"], tokens


@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=pytest.mark.extended)])
def test_a_request_that_ends_the_engine_gets_an_error_and_no_stream_beside_it_is_lost(
    fragile: Served, how: str
) -> None:
    def restarts() -> int:
        return fragile.deployment.restarts_of("worker")

    wait_until(fragile.is_ready)
    before = restarts()
    begun = threading.Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = list(pool.map(lambda seed: read_stream(fragile, seed), range(STREAMS)))
        assert [(finish, tokens) for _, finish, tokens in expected] == [("length", TOKENS)] * STREAMS
        streams = [pool.submit(read_stream, fragile, seed, begun) for seed in range(STREAMS)]
        begun.wait(timeout=120)
        body = {"model": fragile.model, "prompt": [100, *FATAL[how], 200], "max_tokens": 5}
        with fragile.http() as http:
            answer = http.post("/v1/completions", json=body, timeout=300)
            repeated = http.post("/v1/completions", json=body)
        assert [stream.result() for stream in streams] == expected
    for refused in (answer, repeated):
        assert refused.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        assert "repeatedly ended the engine" in refused.json()["error"]["message"]
    assert restarts() - before == (QUARANTINED_AFTER if how == "kill" else 0)
    assert fragile.complete("Hi", max_tokens=2)
    wait_until(fragile.is_idle, what=lambda: str(fragile.state(include_requests=True)))
