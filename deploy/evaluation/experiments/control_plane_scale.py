"""The processor time of tokenizer, detokenizer and state server in front of many scheduler groups.

Run as `python -m deploy.evaluation.experiments.control_plane_scale [tokenizer|detokenizer|state …]`; `state` requires a
redis-server. The measured services are real processes. The groups are simulated: they speak the protocol and compute
nothing, so that a thousand of them fit on one machine. Figures are shares of a core, or processor time per request,
token or command, which a busy machine changes less than rates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.table import Table

from common.requests import GenerateRequest
from common.rpc.channel import open_channel
from common.rpc.stream import wait_until_accepted
from common.types import ReplyTo, RequestId, RequestOptions, Subject, SubscriberId, View
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, current_commit, write_results
from deploy.evaluation.experiments.start_up import processor_s
from deploy.evaluation.experiments.state_server_scale import measure_state_server
from deploy.supervisor.layout import free_port
from gateway.pipeline.wire import generate_to_wire
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator, Sequence

BENCHMARK = "control_plane_scale"
MODEL = "smollm2-135m-instruct"
GROUPS = (1, 64, 256, 1000)
POLLED_GROUPS = 64
GROUPS_A_PROCESS = 250
WINDOWS = 3
START_S = 300.0
PROMPT = "Shared prompts of an application have about this many words, so that routing has something to hash. " * 12
# Of a detokenizer: schedulers that push steps of as many rows each, for so many gateways. The last is its part of a
# cell with 6 detokenizers (docs/scaling.md).
DETOKENIZER_LOADS = ((1, 256, 1), (16, 256, 1), (125, 256, 1), (64, 43, 14))
TOKENS_A_LOAD = 200_000


@dataclass(frozen=True, slots=True)
class ScaleFigure:
    """One measured value."""

    service: str
    metric: str
    value: float
    unit: str


def main() -> None:
    """Measure, print a table, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("services", nargs="*", choices=[[], *MEASUREMENTS], help="by default, all")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the three windows of an idle figure")
    parser.add_argument("--groups", type=int, nargs="+", default=list(GROUPS), help="in front of the tokenizer")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    arguments = parser.parse_args()
    figures = [each for name in arguments.services or MEASUREMENTS for each in MEASUREMENTS[name](arguments)]
    table = Table(box=None)
    for name in ("service", "figure", "value", "unit"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for figure in figures:
        table.add_row(figure.service, figure.metric, f"{figure.value:.3g}", figure.unit)
    output_console().print(table)
    if arguments.json:
        keep(figures, arguments.json)


def keep(figures: Sequence[ScaleFigure], path: Path) -> None:
    """Write the figures to a file of results."""
    command = shlex.join(["python", "-m", f"deploy.evaluation.experiments.{BENCHMARK}", *sys.argv[1:]])
    origin = Provenance(command, current_commit(), datetime.datetime.now(datetime.UTC).date().isoformat())
    for service in dict.fromkeys(figure.service for figure in figures):
        sheet = ResultSheet(BENCHMARK, MODEL, 1, origin, service)
        for figure in figures:
            if figure.service == service:
                sheet.add(figure.metric, figure.value, figure.unit)
        write_results(path, sheet.results)


@contextlib.contextmanager
def running(*command: str) -> Iterator[int]:
    """Run `python -m` with a command; return its process id."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def share_of_a_core(pid: int, seconds: float) -> float:
    """Return the median of three windows: processor time by time."""
    shares = []
    for _ in range(WINDOWS):
        before = processor_s(pid)
        asyncio.run(asyncio.sleep(seconds))
        shares.append((processor_s(pid) - before) / seconds)
    return statistics.median(shares)


# --- the tokenizer ---


def measure_tokenizer(arguments: argparse.Namespace) -> Iterator[ScaleFigure]:
    """Yield its share of a core without requests, and its processor time per request."""
    plans = [(POLLED_GROUPS, "polled"), *((groups, mode) for groups in arguments.groups for mode in ("idle", "busy"))]
    for groups, mode in plans:
        with tempfile.TemporaryDirectory(prefix="pando-scale-") as folder, tokenizer(folder, groups, mode) as pid:
            name = f"{groups} groups, {mode}"
            yield ScaleFigure(
                "tokenizer", f"{name}: without requests", 100 * share_of_a_core(pid, arguments.seconds), "%"
            )
            if mode == "idle":
                took = asyncio.run(request_cost(f"unix:{folder}/tokenizer.sock", pid, arguments.requests))
                yield ScaleFigure("tokenizer", f"{name}: per request", 1e6 * took, "µs")


@contextlib.contextmanager
def tokenizer(folder: str, groups: int, mode: str) -> Iterator[int]:
    """Run a tokenizer in front of simulated groups; return its process id once it knows all of them."""
    module = "deploy.evaluation.experiments.simulated_groups"
    port = free_port("127.0.0.1")
    with contextlib.ExitStack() as stack:
        for first in range(0, groups, GROUPS_A_PROCESS):
            some = min(GROUPS_A_PROCESS, groups - first)
            stack.enter_context(running(module, folder, f"{first}", f"{some}", mode))
        wait_until(lambda: all(Path(folder, f"{number}.sock").exists() for number in range(groups)), START_S)
        config = Path(folder, "tokenizer.toml")
        # The second address that does not exist makes it choose also among a single group.
        addresses = [f"unix:{folder}/{number}.sock" for number in range(max(groups, 2))]
        config.write_text(
            f'[tokenizer]\naddress = "unix:{folder}/tokenizer.sock"\nschedulers = {addresses}\nmetrics_port = {port}\n'
            '[log]\nlevel = "error"\n'
        )
        pid = stack.enter_context(running("services.tokenizer", "--config", str(config)))
        wait_until(lambda: serving_groups(port) == groups, START_S, step_s=0.5)
        yield pid


def serving_groups(port: int) -> int:
    """Return the number of groups that a tokenizer would send requests to, by its metrics."""
    try:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60).text.splitlines()
    except httpx.HTTPError:
        return 0
    return sum(line.startswith("pando_tokenizer_replica_serving{") and line.endswith(" 1.0") for line in lines)


async def request_cost(address: str, pid: int, requests: int) -> float:
    """Return the processor seconds of a tokenizer per request, one request per message."""
    async with open_channel(address) as channel:
        call = tokenizer_pb2_grpc.TokenizerStub(channel).Submit()
        await wait_until_accepted(call)
        for number in range(2 * requests):
            if number == requests:
                before = processor_s(pid)
            view = View(Subject("tenant", f"user-{number}"))
            request = GenerateRequest(RequestId(f"r{number}"), view, MODEL, f"{number} {PROMPT}", RequestOptions())
            wire = generate_to_wire(request, ReplyTo(SubscriberId("gateway")))
            await call.write(tokenizer_pb2.TokenizerSubmitRequest(generates=[wire]))
            answer = await call.read()
            assert isinstance(answer, tokenizer_pb2.TokenizerSubmitResponse)
            assert not answer.admissions[0].HasField("rejected"), answer
        return (processor_s(pid) - before) / requests


# --- the detokenizer ---


@dataclass(frozen=True, slots=True)
class DetokenizerLoad:
    """Schedulers in front of a detokenizer, each with `rows` choices, which belong to all gateways in turn."""

    schedulers: int
    rows: int
    gateways: int

    @property
    def name(self) -> str:
        """The name in results; that of a single gateway is left out."""
        gateways = f", {self.rows} rows, {self.gateways} gateways" if self.gateways > 1 else ""
        return f"{self.schedulers} schedulers{gateways}"


@dataclass(frozen=True, slots=True)
class DetokenizerCost:
    """Share of a core without output, processor seconds per token at its limit, and tokens per message to a gateway."""

    idle: float
    token_s: float
    tokens_a_message: float


def measure_detokenizer(arguments: argparse.Namespace) -> Iterator[ScaleFigure]:
    """Yield its processor time per token, by the number of schedulers and gateways, and its share without output."""
    for load in (DetokenizerLoad(*sizes) for sizes in DETOKENIZER_LOADS):
        with tempfile.TemporaryDirectory(prefix="pando-scale-") as folder:
            address = f"unix:{folder}/detokenizer.sock"
            flags = ("--detokenizer.address", address, "--log.level", "error")
            with running("services.detokenizer", *flags) as pid:
                wait_until(Path(folder, "detokenizer.sock").exists, START_S)
                cost = asyncio.run(detokenizer_cost(address, pid, load, arguments.seconds))
                yield ScaleFigure("detokenizer", f"{load.name}: without output", 100 * cost.idle, "%")
                yield ScaleFigure("detokenizer", f"{load.name}: per token", 1e6 * cost.token_s, "µs")
                if load.gateways > 1:
                    yield ScaleFigure("detokenizer", f"{load.name}: per message", cost.tokens_a_message, "tokens")


async def detokenizer_cost(address: str, pid: int, load: DetokenizerLoad, seconds: float) -> DetokenizerCost:
    """Measure a detokenizer: each scheduler sends heartbeats, and then steps, as fast as they are taken."""
    async with open_channel(address) as channel, asyncio.TaskGroup() as tasks:
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        received = _Count()
        reading = []
        for gateway in range(load.gateways):
            request = detokenizer_pb2.SubscribeRequest(subscriber_id=f"gateway-{gateway}")
            subscription = stub.Subscribe(request, wait_for_ready=True)
            await wait_until_accepted(subscription)
            reading.append(tasks.create_task(received.read(subscription)))
        pushers = [_Pusher(stub, load) for _ in range(load.schedulers)]
        for pusher in pushers:
            await pusher.open()
        beats = [tasks.create_task(pusher.beat()) for pusher in pushers]
        await asyncio.sleep(1)
        before = processor_s(pid)
        await asyncio.sleep(seconds)
        idle = (processor_s(pid) - before) / seconds
        for beat in beats:
            beat.cancel()
        before, tokens, messages = processor_s(pid), received.tokens, received.messages
        steps = max(4, TOKENS_A_LOAD // (load.schedulers * load.rows))
        for _ in range(steps):
            for pusher in pushers:
                await pusher.step()
        while received.tokens < tokens + steps * load.schedulers * load.rows:  # noqa: ASYNC110  (another process counts)
            await asyncio.sleep(0.01)
        pushed = received.tokens - tokens
        cost_s = (processor_s(pid) - before) / pushed
        for task in reading:
            task.cancel()
        for pusher in pushers:
            pusher.close()
        return DetokenizerCost(idle, cost_s, pushed / (received.messages - messages))


class _Count:
    """Counts the tokens that gateways receive, and the messages that have some."""

    def __init__(self) -> None:
        self.tokens = 0
        self.messages = 0

    async def read(self, messages: AsyncIterable[detokenizer_pb2.SubscribeResponse]) -> None:
        async for message in messages:
            self.messages += bool(message.deltas)
            self.tokens += sum(len(delta.token_ids) for delta in message.deltas)


class _Pusher:
    """A scheduler's stream with the open choices of a load."""

    def __init__(self, stub: detokenizer_pb2_grpc.DetokenizerAsyncStub, load: DetokenizerLoad) -> None:
        self._call = stub.Push()
        self._sequence = 0
        self._load = load
        self._handles = list(range(load.rows))

    async def open(self) -> None:
        """Open the choices."""
        await wait_until_accepted(self._call)
        opens = [
            detokenizer_pb2.ChoiceOpen(
                handle=handle,
                request_id=f"{id(self)}-{handle}",
                subscriber_id=f"gateway-{handle % self._load.gateways}",
            )
            for handle in self._handles
        ]
        await self._write(detokenizer_pb2.PushRequest(opens=opens))

    async def step(self) -> None:
        """Push one token of each choice."""
        ids = [1000 + (self._sequence * 31 + 7 * handle) % 20_000 for handle in self._handles]
        await self._write(detokenizer_pb2.PushRequest(handles=self._handles, token_ids=ids))

    async def beat(self) -> None:
        """Send a heartbeat each second until cancelled."""
        while True:
            await self._write(detokenizer_pb2.PushRequest(heartbeat=True))
            await self._call.read()
            await asyncio.sleep(1)

    def close(self) -> None:
        self._call.cancel()

    async def _write(self, message: detokenizer_pb2.PushRequest) -> None:
        self._sequence += 1
        message.sequence = self._sequence
        await self._call.write(message)


def measure_state(arguments: argparse.Namespace) -> Iterator[ScaleFigure]:
    """Yield the state server's processor time for each thing that is kept there."""
    for metric, value, unit in measure_state_server(arguments.seconds):
        yield ScaleFigure("state server", metric, value, unit)


MEASUREMENTS = {"tokenizer": measure_tokenizer, "detokenizer": measure_detokenizer, "state": measure_state}

if __name__ == "__main__":
    main()
