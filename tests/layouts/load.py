"""Random requests, the clients that send them at the same time, and the answers."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.e2e.served import Served

CLIENTS = 6
# Requests that are refused while a service restarts are repeated for so long, as SDKs do.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish: str

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Answer:
        choice = content["choices"][0]
        told = choice.get("logprobs") or {}
        ids, text = tuple(choice["token_ids"]), choice["text"]
        return cls(ids, text, tuple(told.get("token_logprobs") or ()), choice["finish_reason"])


def requests_of(layout: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return random requests: greedy and seeded, some with common beginnings, stops and log probabilities."""
    draw = random.Random(f"{seed} {layout}")
    beginnings = [_ids(draw, draw.randint(16, 160)) for _ in range(12)]
    return [_request(draw, beginnings) for _ in range(count)]


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(256) for _ in range(count)]


def _request(draw: random.Random, beginnings: Sequence[list[int]]) -> dict[str, Any]:
    prompt = (draw.choice(beginnings) if draw.random() < 0.6 else []) + _ids(draw, draw.randint(1, 96))
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": draw.randint(1, 24), "user": draw.choice("abc"), "return_token_ids": True,
    }  # fmt: skip
    body |= {"temperature": 0} if draw.random() < 0.5 else {"temperature": draw.choice((0.5, 0.8, 1.0, 1.5))}
    body["seed"] = draw.randrange(1 << 31)
    if draw.random() < 0.3:
        body["stop"] = [chr(draw.randrange(32, 127)) for _ in range(4)]
    if draw.random() < 0.3:
        body["stop_token_ids"] = _ids(draw, 8)
    if draw.random() < 0.3:
        body["ignore_eos"] = True
    if draw.random() < 0.4:
        body["logprobs"] = draw.randint(0, 3)
    return body


class Load:
    """Clients that send requests at the same time, each of which begins with the next one."""

    def __init__(self, served: Served, bodies: Sequence[Mapping[str, Any]]) -> None:
        self.answers: list[Answer | None] = [None] * len(bodies)
        self.refusals = 0
        self._has_ended = False
        self._served = served
        self._bodies = bodies
        self._lock = threading.Lock()

    @property
    def answered(self) -> int:
        return sum(answer is not None for answer in self.answers)

    def run(self, disturb: Callable[[Load], None] = lambda _: None) -> list[Answer]:
        """Send all requests while `disturb` runs."""
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            disturbing = pool.submit(disturb, self)
            try:
                answers = list(pool.map(self._send, range(len(self._bodies))))
            finally:
                self._has_ended = True
            disturbing.result()
        return answers

    def wait_for(self, answered: int) -> bool:
        """Wait for a number of answers; return False if the load has ended before."""
        wait_until(lambda: self._has_ended or self.answered >= answered, timeout_s=3600)
        return not self._has_ended

    def _send(self, index: int) -> Answer:
        body = {"model": self._served.model, **self._bodies[index]}
        patient_until = time.monotonic() + PATIENCE_S
        with self._served.http() as http:
            while True:
                answer = http.post("/v1/completions", json=body)
                if answer.status_code not in (429, 503) or time.monotonic() > patient_until:
                    break
                with self._lock:
                    self.refusals += 1
                time.sleep(float(answer.headers.get("Retry-After", "1")))
        assert answer.status_code == httpx.codes.OK, f"request {index}: {answer.status_code} {answer.text}"
        read = self.answers[index] = Answer.read(answer.json())
        return read
