"""KV events and vLLM's names of metrics from a real scheduler, as a program outside of Pando reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
import zmq

from common.settings import GatewaySettings, MetricsSettings, ModelSettings, SchedulerSettings, Settings
from deploy.supervisor.layout import free_port
from services.scheduler.kv_events.messages import AllBlocksCleared, BlockStored, decode
from tests.e2e.conftest import serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

PAGE_SIZE = 16


@pytest.fixture(name="metrics_port", scope="module")
def free_metrics_port() -> int:
    return free_port("127.0.0.1")


@pytest.fixture(name="served", scope="module")
def publishing(run_root: Path, metrics_port: int) -> Iterator[Served]:
    scheduler = {
        "page_size": PAGE_SIZE,
        "metrics_port": metrics_port,
        "kv_events": {"endpoint": f"ipc://{run_root}/kv-events", "topic": "kv@here@model"},
    }
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0),
        metrics=MetricsSettings(vllm_names=True),
        scheduler=SchedulerSettings.model_validate(scheduler),
    )
    yield from serve(settings, run_root)


class Subscriber:
    """Holds the blocks that the messages so far have named."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@here@")
        self.socket.connect(endpoint)
        self.blocks: set[int] = set()
        self.clearings = 0

    def read(self) -> int:
        """Return the number of blocks after all messages that have arrived."""
        while self.socket.poll(0):
            _, _, payload = self.socket.recv_multipart()
            for event in decode(payload).events:
                if isinstance(event, AllBlocksCleared):
                    self.blocks.clear()
                    self.clearings += 1
                elif isinstance(event, BlockStored):
                    assert event.block_size == PAGE_SIZE
                    assert event.token_ids == []
                    self.blocks.update(event.block_hashes)
                else:
                    self.blocks.difference_update(event.block_hashes)
        return len(self.blocks)


def ask(served: Served, text: str) -> int:
    """Return the prompt's length in tokens."""
    body = {"model": served.model, "prompt": text, "max_tokens": 1, "temperature": 0}
    with served.http() as http:
        answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


def test_an_outside_reader_sees_the_blocks_of_each_prompt(served: Served, run_root: Path) -> None:
    subscriber = Subscriber(f"ipc://{run_root}/kv-events")

    def is_heard() -> bool:
        # A subscription takes a moment; what was published before is not seen.
        ask(served, f"A prompt of its own, as long as a page or two, number {subscriber.read()} and {len(tried)}. " * 3)
        tried.append(1)
        return subscriber.read() > 0

    tried: list[int] = []
    wait_until(is_heard)
    before = subscriber.read()
    tokens = ask(served, "The blocks of these words are new. " * 20)
    wait_until(lambda: subscriber.read() >= before + tokens // PAGE_SIZE - 1)
    known = set(subscriber.blocks)
    ask(served, "The blocks of these words are new. " * 20)
    ask(served, "And now for something completely different, of which nothing is known. " * 5)
    wait_until(lambda: subscriber.read() > len(known))
    assert known <= subscriber.blocks
    with served.http() as http:
        http.post("/flush_cache").raise_for_status()
    wait_until(lambda: subscriber.read() == 0)
    subscriber.context.destroy(linger=0)


def test_the_scheduler_exposes_its_metrics_under_the_names_of_vllm(served: Served, metrics_port: int) -> None:
    ask(served, "Count me.")
    labels = f'engine="0",model_name="{served.model}"'
    lines: dict[str, str] = {}

    def is_idle() -> bool:
        # The scheduler renews gauges every second or so.
        text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=60, trust_env=False).text
        lines.update(dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:")))
        return float(lines[f"vllm:num_requests_waiting{{{labels}}}"]) == 0

    wait_until(is_idle)
    assert float(lines[f"vllm:prompt_tokens_total{{{labels}}}"]) > 0
    assert 0 <= float(lines[f"vllm:kv_cache_usage_perc{{{labels}}}"]) <= 1
    assert any(f'block_size="{PAGE_SIZE}"' in name for name in lines if name.startswith("vllm:cache_config_info"))
