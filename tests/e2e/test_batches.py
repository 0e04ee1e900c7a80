"""Batches with all services: each line once, with its own output, whichever services are killed meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from common.settings import BatchesSettings, GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.tokenization.text_model import load_served_model
from deploy.supervisor.layout import free_port
from tests.e2e.conftest import fake_steps, serve
from tests.e2e.processes import Processes
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.e2e.deployment import Deployment
    from tests.e2e.served import Served

# Sets another number of lines for the test with random kills.
LINES = "BATCH_LINES"
SERVICES = ("worker", "scheduler", "detokenizer", "tokenizer", "gateway")
ENDPOINT = "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
INSTRUCTIONS = "Say in a few words what this line of a long list is about, and nothing else. " * 3
STEP_MS = 10.0
RECOVERY_S = 120.0
# Every so-manieth line is one that its endpoint refuses.
REFUSED_EACH = 50


@pytest.fixture(scope="module")
def served_batches(run_root: Path) -> Iterator[Served]:
    """A deployment whose batches are in a file, so that the gateway continues them after a restart."""
    batches = BatchesSettings(file=run_root / "batches.db", lines_at_once=64)
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="local", batches=batches),
        scheduler=SchedulerSettings(max_rows=16),
    )
    with fake_steps(STEP_MS):
        yield from serve(settings, run_root)


class Line:
    """One line of a batch, and what is expected of its output."""

    def __init__(self, number: int, model: str) -> None:
        self.custom_id = f"line-{number}"
        self.is_refused = number % REFUSED_EACH == 7
        self.prompt = f"{INSTRUCTIONS if number % 2 else ''}Line {number}"
        self.max_tokens = 4 + number * 7 % 40
        self.body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "seed": number,
            "temperature": "hot" if self.is_refused else 1.0,
        }

    def encode(self) -> str:
        request = {"custom_id": self.custom_id, "method": "POST", "url": ENDPOINT, "body": self.body}
        return json.dumps(request)


class RunningBatch:
    """A batch, asked for at any of several gateways."""

    def __init__(self, urls: Sequence[str], lines: Sequence[Line]) -> None:
        self.lines = lines
        self._urls = itertools.cycle(urls)
        content = "\n".join(line.encode() for line in lines)
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content.encode())}}
        file_id = self._ask("POST", "/v1/files", **form).json()["id"]
        body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        self.id = str(self._ask("POST", "/v1/batches", json=body).json()["id"])

    def retrieve(self) -> dict[str, Any]:
        return dict(self._ask("GET", f"/v1/batches/{self.id}").json())

    @property
    def done(self) -> int:
        """Number of lines with an outcome."""
        counts = self.retrieve()["request_counts"]
        return int(counts["completed"] + counts["failed"])

    def content(self, file_id: str) -> list[dict[str, Any]]:
        text = self._ask("GET", f"/v1/files/{file_id}/content").text
        return [json.loads(each) for each in text.splitlines()]

    def _ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        """Return the first response of a gateway that is up."""
        response: httpx.Response | None = None

        def is_answered() -> bool:
            nonlocal response
            try:
                response = httpx.request(method, next(self._urls) + path, timeout=60, trust_env=False, **given)
            except httpx.TransportError:
                return False
            return response.status_code == httpx.codes.OK

        wait_until(is_answered, RECOVERY_S, what=lambda: f"{method} {path}: {response and response.text}")
        assert response is not None
        return response


def check(batch: RunningBatch, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    """Check that each line of a completed batch has its outcome once, and return the outputs."""
    found = batch.retrieve()
    refused = [line for line in batch.lines if line.is_refused]
    answered = [line for line in batch.lines if not line.is_refused]
    counts = {"total": len(batch.lines), "completed": len(answered), "failed": len(refused)}
    assert (found["status"], found["request_counts"]) == ("completed", counts), found
    outputs, errors = batch.content(found["output_file_id"]), batch.content(found["error_file_id"])
    assert [each["custom_id"] for each in outputs] == [line.custom_id for line in answered]
    assert [each["custom_id"] for each in errors] == [line.custom_id for line in refused]
    assert {each["response"]["status_code"] for each in errors} == {400}
    usages = [each["response"]["body"]["usage"] for each in outputs]
    for line, output, usage in zip(answered, outputs, usages, strict=True):
        assert output["response"]["status_code"] == 200
        expected = (count_tokens(line.prompt), line.max_tokens)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == expected, line.custom_id
    assert sum(usage["completion_tokens"] for usage in usages) == sum(line.max_tokens for line in answered)
    return outputs


def check_texts(served: Served, batch: RunningBatch, outputs: Sequence[dict[str, Any]], step: int) -> None:
    """Check that every `step`-th output is what the request alone is answered with."""
    bodies = {line.custom_id: line.body for line in batch.lines}
    chosen = outputs[::step]
    assert len(chosen) > 5
    with served.http() as http:
        for output in chosen:
            answer = http.post(ENDPOINT, json=bodies[output["custom_id"]]).json()
            assert output["response"]["body"]["choices"][0]["text"] == answer["choices"][0]["text"]


def token_counter() -> Callable[[str], int]:
    tokenizer = load_served_model(ModelSettings()).tokenizer
    return lambda text: len(tokenizer.encode(text))


def has_ended(batch: RunningBatch) -> bool:
    return batch.retrieve()["status"] in ENDED


def advance(batch: RunningBatch, least: float, timeout_s: float = RECOVERY_S) -> None:
    """Wait until `least` lines have an outcome or the batch has ended."""
    wait_until(lambda: has_ended(batch) or batch.done >= least, timeout_s, what=lambda: str(batch.retrieve()))


def kill(deployment: Deployment, name: str) -> None:
    """Kill a service, and wait until another process is in its place."""
    before = deployment.pid_of(name)
    deployment.kill(name)
    wait_until(lambda: deployment.pid_of(name) not in (None, before), RECOVERY_S)


@pytest.mark.slow
def test_each_line_has_one_outcome_though_every_service_is_killed_once(served_batches: Served) -> None:
    batch = RunningBatch([served_batches.url], [Line(number, served_batches.model) for number in range(300)])
    for number, name in enumerate(SERVICES, start=1):
        advance(batch, len(batch.lines) * number / (len(SERVICES) + 4))
        assert batch.retrieve()["status"] == "in_progress"
        kill(served_batches.deployment, name)
    wait_until(lambda: has_ended(batch), RECOVERY_S, what=lambda: str(batch.retrieve()))
    outputs = check(batch, token_counter())
    wait_until(served_batches.is_ready, RECOVERY_S)
    check_texts(served_batches, batch, outputs, step=20)
    with served_batches.leaving_nothing_behind():
        pass


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_ten_thousand_lines_have_one_outcome_each_across_random_kills(served_batches: Served, run_root: Path) -> None:
    """Kill services, and either of two gateways, at random until the batch has ended."""
    number_of_lines = int(os.environ.get(LINES, "10000"))
    deployment, chance = served_batches.deployment, random.Random(20)
    ours, port = deployment.layout.find("gateway").settings.gateway, free_port("127.0.0.1")
    second = {
        "gateway.port": port,
        "gateway.anonymous": "local",
        "gateway.tokenizer": ours.tokenizer,
        "gateway.detokenizer": ours.detokenizer,
        "gateway.batches.file": ours.batches.file,
        "gateway.batches.lines_at_once": ours.batches.lines_at_once,
        "model.load_format": "fake",
    }
    processes = Processes(run_root)
    processes.start("second", "gateway", second)
    try:
        urls = [served_batches.url, f"http://127.0.0.1:{port}"]
        batch = RunningBatch(urls, [Line(number, served_batches.model) for number in range(number_of_lines)])
        advance(batch, 1)
        kills = dict.fromkeys((*SERVICES, "second"), 0)
        while not has_ended(batch):
            # The first round kills each of them.
            name = next((name for name, times in kills.items() if not times), chance.choice([*kills]))
            kills[name] += 1
            if name == "second":
                processes.end("second", signal.SIGKILL)
                processes.start("second", "gateway", second)
            else:
                # Several may be down at a time.
                deployment.kill(name)
            advance(batch, batch.done + chance.uniform(0.001, 0.04) * number_of_lines, 5 * RECOVERY_S)
        outputs = check(batch, token_counter())
        assert all(kills.values()), kills
        wait_until(served_batches.is_ready, RECOVERY_S)
        check_texts(served_batches, batch, outputs, step=number_of_lines // 20)
    finally:
        processes.stop()
