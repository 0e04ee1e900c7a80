"""Deployments whose workers and schedulers are on hosts of their own, which a slow network joins."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from common.rpc.options import CHANNEL_OPTIONS
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.processes import Processes
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.e2e.hosts import Host

WORKER, SCHEDULER = 50053, 50052
START_S = 180.0
# Between looks at the workers, of which those that have ended are started again.
KEEP_S = 0.1


class Site:
    """Workers and schedulers on hosts; the other services are on another, which is this one.

    Workers that end are started again, as by a supervisor on each host.
    """

    def __init__(self, directory: Path, model: Path, on: Sequence[Host]) -> None:
        """Serve `model`; without hosts, one worker and its scheduler are on this one, too."""
        self._processes = Processes(directory)
        self._directory = directory
        self._on = on
        self._common = {"model.reference": model, "model.dtype": "float32", "rpc.plaintext": "true"}
        self._detokenizer = f"{on[0].network}.1:50054" if on else f"unix:{directory}/detokenizer.sock"
        self._tokenizer = f"unix:{directory}/tokenizer.sock"
        self._workers: dict[str, tuple[dict[str, object], Host | None]] = {}
        self._is_ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._pool = ThreadPoolExecutor(32)
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
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=150, limits=httpx.Limits(max_connections=None)
        )
        wait_until(self._is_ready, START_S, what=self._processes.logs)
        wait_until(lambda: all(is_serving(address) for address in schedulers), START_S, what=self._processes.logs)
        self._keeper.start()

    def start_workers(self) -> list[str]:
        """Start a worker on each host, or one on this one; return their addresses."""
        places: dict[str, tuple[str, Host | None]]
        places = {f"worker-{host.name}": (f"{host.address}:{WORKER}", host) for host in self._on}
        for name, (address, host) in (places or {"worker": (f"unix:{self._directory}/worker.sock", None)}).items():
            settings: dict[str, object] = {
                "worker.address": address, "worker.device": "cpu", "worker.threads": 1,
            }  # fmt: skip
            self._workers[name] = settings, host
            self._start(name, "services.worker", settings, host)
        return [str(settings["worker.address"]) for settings, _ in self._workers.values()]

    def start_scheduler(self, host: Host | None, workers: Sequence[str], **settings: object) -> str:
        """Start a scheduler on a host; return its address."""
        address = f"{host.address}:{SCHEDULER}" if host else f"unix:{self._directory}/scheduler.sock"
        own = {
            "scheduler.address": address,
            "scheduler.workers": json.dumps(list(workers)),
            "scheduler.detokenizer": self._detokenizer,
            "scheduler.max_step_tokens": 64,
        }
        named = {f"scheduler.{name}": value for name, value in settings.items()}
        name = f"scheduler-{host.name}" if host else "scheduler"
        self._start(name, "services.scheduler", own | named, host)
        return address

    def kill_worker(self, host: Host) -> None:
        """Kill the worker of a host; another one takes its place."""
        self._processes.kill(f"worker-{host.name}")

    def send(self, bodies: Sequence[Mapping[str, Any]]) -> list[Future[list[int]]]:
        """Send requests for completions at once; the results are the tokens of their answers."""
        model = self.http.get("/v1/models").json()["data"][0]["id"]
        common = {"model": model, "ignore_eos": True, "return_token_ids": True}
        return [self._pool.submit(self._answer, {**common, **body}) for body in bodies]

    def stop(self) -> None:
        """End all processes."""
        self._is_ending.set()
        if self._keeper.ident is not None:
            self._keeper.join()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.http.close()
        self._processes.stop()

    def _answer(self, body: Mapping[str, Any]) -> list[int]:
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == httpx.codes.OK, f"{answer.text} {self._processes.logs()}"
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def _start(self, name: str, module: str, settings: dict[str, object], host: Host | None = None) -> None:
        prefix = () if host is None else host.prefix
        self._processes.start(name, module, {**self._common, **settings}, prefix)

    def _keep(self) -> None:
        while not self._is_ending.wait(KEEP_S):
            for name, (settings, host) in self._workers.items():
                if self._processes.has_ended(name):
                    self._start(name, "services.worker", settings, host)

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


def is_serving(address: str) -> bool:
    """Whether a scheduler answers, and has all of its workers."""
    try:
        return state_of(address).worker_group == "READY"
    except grpc.RpcError:
        return False


def state_of(address: str) -> scheduler_pb2.GetStateResponse:
    """Return the state of the scheduler at an address."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=60)


def holds_nothing(state: scheduler_pb2.GetStateResponse) -> bool:
    """Whether a scheduler has no requests, and keeps nothing for another group."""
    busy = state.running_rows + state.waiting_requests + state.disaggregation.open_leases
    return not busy + state.host_tier.open_transfers + state.leaked_pages
