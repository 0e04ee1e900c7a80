"""Stages of a pipeline, and groups with roles, on two hosts that a slow network joins: the tokens of one rank."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from common.rpc.options import CHANNEL_OPTIONS
from deploy.supervisor.layout import free_port
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.byte_models import LAYERS, continued, save_byte_model
from tests.e2e.hosts import Host, NoHostsError, hosts
from tests.e2e.processes import Processes
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.slow, pytest.mark.extended]

# Of the hosts' network, in Mbit/s: a page of the model's takes 13 ms.
BANDWIDTH = 20
# Of a packet at each interface that it goes through, in ms: two of them between two hosts.
DELAYS = (0, 5)
WORKER, SCHEDULER = 50053, 50052
TOKENS = 12
PREFILL_TOKENS = 48
PROMPTS = [[random.Random(number).randrange(256) for _ in range(60 + 40 * number)] for number in range(5)]
START_S = 180.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return continued(model, PROMPTS, TOKENS)


@pytest.fixture(params=DELAYS, ids=lambda delay_ms: f"{2 * delay_ms} ms apart")
def two_hosts(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    delay_ms: int = request.param
    try:
        with hosts(2, BANDWIDTH, delay_ms) as made:
            # There and back, through the interface of that host.
            assert made[0].round_trip_s() >= 2 * delay_ms / 1000
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


class Site:
    """Workers and schedulers on two hosts; the other services are on a third, which is this one."""

    def __init__(self, directory: Path, model: Path, on: Sequence[Host]) -> None:
        self._processes = Processes(directory)
        self._on = on
        self._common = {"model.reference": model, "model.dtype": "float32", "rpc.plaintext": "true"}
        self._detokenizer = f"{on[0].network}.1:50054"
        self._tokenizer = f"unix:{directory}/tokenizer.sock"
        self.http = httpx.Client(base_url="http://127.0.0.1:0", trust_env=False, timeout=150)

    def start(self, schedulers: Sequence[str], port: int) -> None:
        """Start the other services, for schedulers at these addresses, and wait until all serve."""
        self._start("detokenizer", "services.detokenizer", {"detokenizer.address": self._detokenizer})
        self._start(
            "tokenizer",
            "services.tokenizer",
            {"tokenizer.address": self._tokenizer, "tokenizer.schedulers": json.dumps(list(schedulers))},
        )
        gateway = {"gateway.tokenizer": self._tokenizer, "gateway.detokenizer": self._detokenizer}
        self._start("gateway", "gateway", {"gateway.port": port, **gateway})
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=150)
        wait_until(self._is_ready, START_S, what=self._processes.logs)

    def start_workers(self) -> list[str]:
        """Start a worker on each host; return their addresses."""
        addresses = [f"{host.address}:{WORKER}" for host in self._on]
        for host, address in zip(self._on, addresses, strict=True):
            settings = {"worker.address": address, "worker.device": "cpu", "worker.threads": 1}
            self._start(f"worker-{host.name}", "services.worker", settings, host)
        return addresses

    def start_scheduler(self, host: Host, workers: Sequence[str], **settings: object) -> str:
        """Start a scheduler on a host; return its address."""
        address = f"{host.address}:{SCHEDULER}"
        own = {
            "scheduler.address": address,
            "scheduler.workers": json.dumps(list(workers)),
            "scheduler.detokenizer": self._detokenizer,
            "scheduler.max_step_tokens": 64,
        }
        named = {f"scheduler.{name}": value for name, value in settings.items()}
        self._start(f"scheduler-{host.name}", "services.scheduler", own | named, host)
        return address

    def answers(self) -> list[list[int]]:
        """Return the tokens that continue each prompt."""
        return [self._answer(prompt) for prompt in PROMPTS]

    def stop(self) -> None:
        self.http.close()
        self._processes.stop()

    def _answer(self, prompt: Sequence[int]) -> list[int]:
        body = {
            "model": self.http.get("/v1/models").json()["data"][0]["id"], "prompt": prompt, "max_tokens": TOKENS,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == httpx.codes.OK, f"{answer.text} {self._processes.logs()}"
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def _start(self, name: str, module: str, settings: dict[str, object], host: Host | None = None) -> None:
        prefix = () if host is None else host.prefix
        self._processes.start(name, module, {**self._common, **settings}, prefix)

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@pytest.fixture
def site(run_root: Path, model: Path, two_hosts: list[Host]) -> Iterator[Site]:
    site = Site(Path(mkdtemp(dir=run_root)), model, two_hosts)
    yield site
    site.stop()


def test_stages_on_two_hosts_answer_as_one_rank(site: Site, two_hosts: list[Host], expected: list[list[int]]) -> None:
    first = two_hosts[0]
    scheduler = site.start_scheduler(
        first, site.start_workers(), pipeline_parallel=2, rendezvous=f"{first.address}:29500"
    )
    site.start([scheduler], free_port("127.0.0.1"))
    before = [host.sent_bytes() for host in two_hosts]
    assert site.answers() == expected
    # Hidden states go from the first stage to the second one: 48 numbers of 4 bytes for each token.
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (TOKENS - 1)
    assert two_hosts[0].sent_bytes() - before[0] > 4 * 48 * tokens


def test_groups_with_roles_on_two_hosts_answer_as_one_rank(
    site: Site, two_hosts: list[Host], expected: list[list[int]]
) -> None:
    prefill, decode = two_hosts
    workers = site.start_workers()
    roles = {"host_tier.pages": 256, "prefill_min_tokens": PREFILL_TOKENS}
    schedulers = [
        site.start_scheduler(host, [worker], role=role, **roles)
        for host, worker, role in zip((prefill, decode), workers, ("prefill", "decode"), strict=True)
    ]
    site.start(schedulers, free_port("127.0.0.1"))
    wait_until(lambda: all(state_of(address).worker_group == "READY" for address in schedulers), START_S)
    before = prefill.sent_bytes()
    assert site.answers() == expected
    state = state_of(schedulers[1])
    # On a busy machine, computing a prompt where it is decoded may be faster than waiting for its pages.
    assert state.disaggregation.remote_prefills
    assert state.disaggregation.fetched_pages
    page_bytes = 16 * LAYERS * 2 * 2 * 32 * 4
    assert prefill.sent_bytes() - before > state.disaggregation.fetched_pages * page_bytes
    wait_until(lambda: all(holds_nothing(state_of(address)) for address in schedulers))


def state_of(address: str) -> scheduler_pb2.GetStateResponse:
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=60)


def holds_nothing(state: scheduler_pb2.GetStateResponse) -> bool:
    busy = state.running_rows + state.waiting_requests + state.disaggregation.open_leases
    return not busy + state.host_tier.open_transfers + state.leaked_pages
