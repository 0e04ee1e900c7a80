"""Two scheduler groups behind one gateway, tokenizer and detokenizer."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import grpc
import httpx

from common.rpc.options import CHANNEL_OPTIONS
from deploy.supervisor.layout import free_port
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.worker.engine.execution.fake_model import STEP_VARIABLE
from tests.e2e.processes import STOP_S, Processes
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GROUPS = (0, 1)
TOKENS = 40
PROMPT = "A long prompt that every user begins with, so that its pages are worth keeping. " * 8


class Tier:
    """One gateway, tokenizer and detokenizer; two schedulers with a worker each, whose engine makes tokens up."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        step_ms: float = 5,
        groups: Sequence[int] = GROUPS,
    ) -> None:
        """Keep sockets and logs in `directory`; `settings` are those of all services: {"scheduler.max_rows": 2}.

        A forward pass takes `step_ms`.
        """
        self.groups = groups
        # Of services, by the names of their processes: they take effect at the next start.
        self.variables: dict[str, dict[str, str]] = {}
        self._directory = directory
        self._settings = settings or {}
        self._step_ms = step_ms
        self._processes = Processes(directory)
        self.port, self.metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120, trust_env=False)

    def start(self) -> None:
        self.launch()
        # The gateway is ready as soon as one is; whoever asks before the other is known finds a home with the first.
        wait_until(lambda: self.is_ready() and self.known() == len(self.groups), timeout_s=120, what=self.logs)

    def launch(self) -> None:
        """Start all services without waiting until they serve."""
        self.start_detokenizer()
        for group in self.groups:
            self.start_group(group)
        self.start_tokenizer()
        self.start_gateway()

    def start_tokenizer(self) -> None:
        schedulers = [f'"{self._socket(f"scheduler-{group}")}"' for group in self.groups]
        self._start(
            "tokenizer",
            "services.tokenizer",
            {
                "tokenizer.address": self._socket("tokenizer"),
                "tokenizer.schedulers": f"[{','.join(schedulers)}]",
                "tokenizer.metrics_port": self.metrics_port,
            },
        )

    def start_gateway(self, name: str = "gateway", port: int | None = None) -> None:
        addresses = {"gateway.tokenizer": self._socket("tokenizer"), "gateway.detokenizer": self._socket("detokenizer")}
        self._start(name, "gateway", {"gateway.port": port or self.port, **addresses})

    def start_detokenizer(self) -> None:
        self._start("detokenizer", "services.detokenizer", {"detokenizer.address": self._socket("detokenizer")})

    def start_group(self, group: int) -> None:
        self.start_worker(group)
        self.start_scheduler(group)

    def start_worker(self, group: int) -> None:
        self._start(f"worker-{group}", "services.worker", {"worker.address": self._socket(f"worker-{group}")})

    def start_scheduler(self, group: int) -> None:
        settings = {
            "scheduler.address": self._socket(f"scheduler-{group}"),
            "scheduler.workers": f'["{self._socket(f"worker-{group}")}"]',
            "scheduler.detokenizer": self._socket("detokenizer"),
        }
        self._start(f"scheduler-{group}", "services.scheduler", settings)

    def end_group(self, group: int, number: signal.Signals) -> None:
        """End a scheduler, which may drain first, and then its worker."""
        self.end(f"scheduler-{group}", number)
        self.end(f"worker-{group}", number)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM, timeout_s: float = STOP_S) -> None:
        """Send a signal to a process and wait until it has ended."""
        self._processes.end(name, number, timeout_s)

    def pid(self, name: str) -> int:
        return self._processes.pid(name)

    def logs(self) -> str:
        """Return the last lines of all processes."""
        return self._processes.logs()

    def is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def known(self) -> int:
        """Return the number of groups that the tokenizer considers ready."""
        lines = self.metrics().splitlines()
        # A tokenizer with a single group does not choose.
        metric = "pando_tokenizer_replica_serving{" if len(self.groups) > 1 else "pando_tokenizer_scheduler_connected "
        return sum(line.startswith(metric) and line.endswith(" 1.0") for line in lines)

    def metrics(self) -> str:
        """Return the tokenizer's metrics."""
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", trust_env=False, timeout=30).text

    def serving(self) -> set[int]:
        return {group for group in GROUPS if (state := self.state(group)) and state.worker_group == "READY"}

    def state(self, group: int) -> scheduler_pb2.GetStateResponse | None:
        with grpc.insecure_channel(self._socket(f"scheduler-{group}"), options=CHANNEL_OPTIONS) as channel:
            try:
                stub = scheduler_pb2_grpc.SchedulerStub(channel)
                return stub.GetState(scheduler_pb2.GetStateRequest(), timeout=10)
            except grpc.RpcError:
                return None

    def steps(self) -> dict[int, int]:
        return {group: state.finished_steps for group in GROUPS if (state := self.state(group))}

    def complete(self, user: str) -> dict[str, int]:
        """Return the completion's usage, with cached tokens, and the number of words that came."""
        # What all of them ask would become public.
        return self.ask(user, f"{user} asks: {PROMPT}")

    def ask(self, user: str, prompt: str, tokens: int = TOKENS) -> dict[str, int]:
        """Return the usage of a completion of `prompt`."""
        body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": tokens, "user": user}
        answer = self.http.post("/v1/completions", json=body | {"temperature": 0})
        assert answer.status_code == httpx.codes.OK, answer.text
        usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {"cached": cached, "prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"]}

    def stop(self) -> None:
        self.http.close()
        self._processes.stop()

    def _socket(self, name: str) -> str:
        return f"unix:{self._directory}/{name}.sock"

    def _start(self, name: str, module: str, settings: Mapping[str, object]) -> None:
        common = {"model.load_format": "fake", "scheduler.drain_s": 20}
        given = {**common, **self._settings, **settings}
        variables = {STEP_VARIABLE: str(self._step_ms), **self.variables.get(name, {})}
        self._processes.start(name, module, given, **variables)
