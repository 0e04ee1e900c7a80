"""A running deployment as tests see it: clients of its HTTP side, and the scheduler's own account of itself."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import httpx
from openai import AsyncOpenAI, OpenAI

from common.rpc.options import CHANNEL_OPTIONS
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.deployment import Deployment

TIMEOUT_S = 300.0


class Served:
    """One deployment, with what tests ask of it."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.url = deployment.url
        self.model = deployment.layout.model

    def client(self) -> OpenAI:
        """Return the SDK as a user has it, but that it shows each error at once."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False)

    def complete(self, prompt: str = "The capital of France is", max_tokens: int = 4, user: str | None = None) -> str:
        """Return a greedy completion."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "user": user}
        with self.http() as http:
            answer = http.post(
                "/v1/completions", json={name: value for name, value in body.items() if value is not None}
            )
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["text"]
        return text

    def is_ready(self) -> bool:
        try:
            with self.http() as http:
                return http.get("/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def state(self, *, include_requests: bool = False) -> scheduler_pb2.GetStateResponse:
        """Return the scheduler's state of queues, rows and pages."""
        with grpc.insecure_channel(self.deployment.address_of("scheduler"), options=CHANNEL_OPTIONS) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            return stub.GetState(scheduler_pb2.GetStateRequest(include_requests=include_requests), timeout=30)

    def is_idle(self) -> bool:
        """Whether no request holds a row or a page; pages kept by the prefix cache may be taken at any time."""
        state = self.state()
        return (
            state.waiting_requests == 0
            and state.running_rows == 0
            and all(
                tier.protected_pages == 0
                and tier.free_pages + tier.soft_free_pages + tier.evictable_pages == tier.capacity_pages
                for tier in state.tiers
            )
        )

    @contextmanager
    def leaving_nothing_behind(self) -> Iterator[None]:
        """Check that the block's requests give back every row and page, and that none was ever lost."""
        yield
        wait_until(self.is_idle, timeout_s=120, what=lambda: f"idle, but: {self.state(include_requests=True)}")
        assert self.state().leaked_pages == 0


def serving_groups(metrics_port: int) -> int:
    """Return the number of scheduler groups that a tokenizer considers ready, by its metrics."""
    metrics = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False, timeout=30).text
    return len(re.findall(r"^pando_tokenizer_replica_serving{[^}]*} 1", metrics, re.MULTILINE))
