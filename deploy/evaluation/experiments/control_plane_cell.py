"""The processor time of a whole cell's control plane in front of simulated scheduler groups, in slow motion.

Run as `python -m deploy.evaluation.experiments.control_plane_cell`; requires a redis-server. One gateway with streaming
clients, all tokenizers and detokenizers, and the Redis servers of `fleet.state` and of the gateways' limits are real
processes. Simulated are the groups, which push tokens as those of an 8B model do and count evidence, and the other
gateways. A cell needs more cores than a machine for experiments has, so groups take their steps `--slow-motion` times
slower: messages are as large as at full speed, but come less often. The processor time of each process, without that
of an idle window before, is divided by what it did, and multiplied by its rate at full speed. That is an upper bound:
a process that is busy takes several messages at once. With `--detokenizers 1`, `--gateways 1` and less slow motion, one
process can be brought to its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.table import Table

from common.errors import UnavailableError
from deploy.evaluation.bench.control_plane.command import allow_open_files
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, current_commit, write_results
from deploy.evaluation.experiments.cell.clients import Clients, now
from deploy.evaluation.experiments.cell.gateways import MODEL, read_counts, run_gateways
from deploy.evaluation.experiments.cell.groups import run_groups
from deploy.evaluation.experiments.cell.plan import SECRET, CellPlan
from deploy.evaluation.experiments.start_up import processor_s
from deploy.supervisor.layout import free_port
from tests.e2e.processes import Processes
from tests.fakes.redis_process import temporary_redis
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.context import SpawnProcess

    from deploy.evaluation.experiments.cell.clients import ClientFigures
    from tests.fakes.redis_process import RedisProcess

BENCHMARK = "control_plane_cell"
START_S = 600.0
OPEN_FILES = 16_384
LEAST_SPEED = 0.9
GROUPS_A_PROCESS = 16
GATEWAYS_A_PROCESS = 7
# Never reached, so that each request is counted in Redis and none is refused.
LIMITS = """
[default]
requests_per_minute = 1000000000
tokens_per_minute = 1000000000
concurrent = 1000000
[default.each_subject]
requests_per_minute = 1000000000
tokens_per_minute = 1000000000
concurrent = 1000000
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Sums since the start of a cell."""

    at_s: float
    processor_s: dict[str, float]
    """By process."""
    tokens: float
    """Of all groups."""
    requests: float
    """Of all gateways."""
    gateway_messages: int
    gateway_tokens: int
    rejections: int
    """Of the simulated gateways, which send a request again that was rejected."""


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """The cost of a service; of several processes, the mean."""

    name: str
    idle: float
    """Share of a core without requests."""
    unit: str
    cost_s: float
    """Processor time per unit, without that of an idle process."""
    share: float
    """Of a core, in the window."""
    planned: float
    """Units per second of one process at full speed."""

    @property
    def planned_share(self) -> float:
        """Share of a core at full speed."""
        return self.idle + self.planned * self.cost_s

    @property
    def carries(self) -> float:
        """Units per second for which one core is enough."""
        return (1 - self.idle) / self.cost_s


@dataclass(frozen=True, slots=True)
class CellFigures:
    """The measurements of one cell."""

    plan: CellPlan
    services: tuple[ServiceFigures, ...]
    speed: float
    """Tokens that groups generated, relative to the plan's slow motion."""
    tokens_a_message: float | None
    """That a simulated gateway receives; None without one."""
    rejections: int
    """Requests of simulated gateways that were rejected, as streams break on a machine that stands still."""
    clients: ClientFigures

    @property
    def is_valid(self) -> bool:
        """Whether the cell kept its pace and lost nothing, so that its costs are those of the plan."""
        return self.speed >= LEAST_SPEED and not self.clients.failures and not self.rejections

    @property
    def label(self) -> str:
        """The name of the cell in results."""
        plan = self.plan
        size = f"{plan.groups} groups x {plan.rows} rows, answers of {plan.answer_tokens}"
        services = f"{plan.gateways} gateways, {plan.tokenizers} tokenizers, {plan.detokenizers} detokenizers"
        return f"{size}, {services}, {plan.slow_motion:g} times slower"


class Cell:
    """The processes of a cell."""

    def __init__(self, plan: CellPlan, limits: RedisProcess, fleet: RedisProcess) -> None:
        """Prepare the services, which `start` starts."""
        self.plan = plan
        self.port = free_port("127.0.0.1")
        self._processes = Processes(Path(plan.directory))
        self._servers = {"Redis: limits": limits, "Redis: fleet.state": fleet}
        self._metrics = {f"tokenizer-{number}": free_port("127.0.0.1") for number in range(plan.tokenizers)}
        self._metrics |= {f"detokenizer-{number}": free_port("127.0.0.1") for number in range(plan.detokenizers)}
        self._context = multiprocessing.get_context("spawn")
        self._started: list[str] = []
        self._simulated: list[SpawnProcess] = []

    def start(self) -> None:
        """Start everything; return once all streams are open."""
        plan = self.plan
        for number in range(plan.detokenizers):
            name = f"detokenizer-{number}"
            settings = {
                "detokenizer.address": plan.detokenizer(number),
                "detokenizer.metrics_port": self._metrics[name],
            }
            self._start(name, "services.detokenizer", settings)
        for first in range(0, plan.groups, GROUPS_A_PROCESS):
            self._simulate(run_groups, first, min(GROUPS_A_PROCESS, plan.groups - first))
        self._wait(lambda: all(Path(plan.directory, f"{number}.sock").exists() for number in range(plan.groups)))
        self._start_tokenizers()
        self._wait(lambda: all(self._serving_groups(each) == plan.groups for each in range(plan.tokenizers)))
        self._start_gateway()
        for first in range(0, plan.gateways - 1, GATEWAYS_A_PROCESS):
            self._simulate(run_gateways, first, min(GATEWAYS_A_PROCESS, plan.gateways - 1 - first))
        self._wait(
            lambda: all(
                self._metric(f"detokenizer-{each}", "pando_detokenizer_subscribers") == plan.gateways
                for each in range(plan.detokenizers)
            )
        )
        self._wait(lambda: httpx.get(f"{self.url}/ready", trust_env=False).is_success)

    def stop(self) -> None:
        """End all processes."""
        for process in self._simulated:
            process.kill()
            process.join()
        for name in self._started:
            self._processes.end(name, signal.SIGKILL)

    @property
    def url(self) -> str:
        """The base URL of the real gateway."""
        return f"http://127.0.0.1:{self.port}"

    def read(self) -> Reading:
        """Return the processor time used and the work done since the start.

        Raises:
            UnavailableError: a simulated part has ended.
        """
        self._check()
        names = ["gateway", *self._metrics]
        used = {name: processor_s(self._processes.pid(name)) for name in names}
        at_s = now()
        for name, server in self._servers.items():
            with server.client() as client:
                info = client.info("cpu")
                used[name] = float(info["used_cpu_user"]) + float(info["used_cpu_sys"])
        counts = read_counts(self.plan)
        return Reading(
            at_s,
            used,
            sum(self._metric(name, "pando_detokenizer_tokens_total") for name in names if name.startswith("detok")),
            sum(self._metric(name, "pando_tokenizer_requests_total") for name in names if name.startswith("tok")),
            counts.messages,
            counts.tokens,
            counts.rejections,
        )

    def _start_tokenizers(self) -> None:
        plan = self.plan
        for number in range(plan.tokenizers):
            settings = {
                "tokenizer.address": plan.tokenizer(number),
                "tokenizer.metrics_port": self._metrics[f"tokenizer-{number}"],
                "tokenizer.schedulers": _listed([plan.group(each) for each in range(plan.groups)]),
                "fleet.state": plan.state,
                "fleet.secret": SECRET,
            }
            self._start(f"tokenizer-{number}", "services.tokenizer", settings)

    def _start_gateway(self) -> None:
        plan = self.plan
        limits = Path(plan.directory, "limits.toml")
        limits.write_text(LIMITS)
        settings = {
            "gateway.port": self.port,
            "gateway.tokenizer": _listed([plan.tokenizer(each) for each in range(plan.tokenizers)]),
            "gateway.detokenizer": _listed([plan.detokenizer(each) for each in range(plan.detokenizers)]),
            "gateway.anonymous": "vouched",
            "gateway.state.url": self._servers["Redis: limits"].url,
            # A larger cell does not record answers: docs/scaling.md.
            "gateway.answers.lifetime_s": 0,
            "limits.file": limits,
        }
        self._start("gateway", "gateway", settings)

    def _start(self, name: str, module: str, settings: dict[str, object]) -> None:
        self._processes.start(name, module, {**settings, "log.level": "warning"})
        self._started.append(name)

    def _simulate(self, run: Callable[[CellPlan, int, int], None], first: int, count: int) -> None:
        process = self._context.Process(target=run, args=(self.plan, first, count), daemon=True)
        process.start()
        self._simulated.append(process)

    def _wait(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self._check()
            with contextlib.suppress(httpx.HTTPError):
                return condition()
            return False

        wait_until(holds, START_S, step_s=1.0, what=self._processes.logs)

    def _check(self) -> None:
        if not all(process.is_alive() for process in self._simulated):
            raise UnavailableError("a simulated part of the cell has ended")

    def _serving_groups(self, tokenizer: int) -> float:
        return self._metric(f"tokenizer-{tokenizer}", "pando_tokenizer_replica_serving")

    def _metric(self, process: str, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = httpx.get(f"http://127.0.0.1:{self._metrics[process]}/metrics", trust_env=False, timeout=60).text
        return sum(
            float(line.rpartition(" ")[2]) for line in lines.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
        )


def _listed(addresses: Sequence[str]) -> str:
    return json.dumps(list(addresses))


@contextlib.contextmanager
def running(plan: CellPlan) -> Iterator[Cell]:
    """Run a cell of this size, with servers and a folder of its own."""
    with (
        temporary_redis() as limits,
        temporary_redis() as fleet,
        tempfile.TemporaryDirectory(prefix="pando-cell-") as folder,
    ):
        cell = Cell(dataclasses.replace(plan, directory=folder, state=fleet.url), limits, fleet)
        try:
            cell.start()
            yield cell
        finally:
            cell.stop()


async def measure(cell: Cell, seconds: float) -> CellFigures:
    """Observe a cell that is idle, and then one whose streams have all begun."""
    plan = cell.plan
    idle = await _window(cell, seconds)
    plan.started.touch()
    clients = Clients(plan, cell.url)
    asking = asyncio.create_task(clients.run())
    try:
        async with asyncio.timeout(START_S):
            while clients.begun < plan.streams:  # noqa: ASYNC110  (counted by callbacks)
                await asyncio.sleep(0.5)
        before, after = await _window(cell, seconds)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    seen = clients.figures(before.at_s, after.at_s)
    messages = after.gateway_messages - before.gateway_messages
    return CellFigures(
        plan,
        services_of(plan, idle, (before, after), seen),
        (after.tokens - before.tokens) / (after.at_s - before.at_s) / plan.tokens_per_s * plan.slow_motion,
        (after.gateway_tokens - before.gateway_tokens) / messages if messages else None,
        after.rejections - before.rejections,
        seen,
    )


async def _window(cell: Cell, seconds: float) -> tuple[Reading, Reading]:
    before = await asyncio.to_thread(cell.read)
    await asyncio.sleep(seconds)
    return before, await asyncio.to_thread(cell.read)


def services_of(
    plan: CellPlan, idle: tuple[Reading, Reading], busy: tuple[Reading, Reading], seen: ClientFigures
) -> tuple[ServiceFigures, ...]:
    """Return the costs of all services from an idle window and one under load."""
    tokens, requests = (busy[1].tokens - busy[0].tokens), (busy[1].requests - busy[0].requests)
    parts = (
        ("gateway", 1, "token", seen.events, plan.tokens_per_s / plan.gateways),
        ("tokenizer", plan.tokenizers, "request", requests, plan.requests_per_s),
        ("detokenizer", plan.detokenizers, "token", tokens, plan.tokens_per_s),
        # Only the real gateway counts its requests.
        ("Redis: limits", 1, "request", seen.requests, plan.requests_per_s),
        ("Redis: fleet.state", 1, "request", requests, plan.requests_per_s),
    )
    figures = []
    for name, count, unit, done, planned in parts:
        waiting, working = (_share(window, name) / count for window in (idle, busy))
        rate = done / count / (busy[1].at_s - busy[0].at_s)
        cost_s = (working - waiting) / rate
        figures.append(ServiceFigures(name, waiting, unit, cost_s, working, planned / count))
    return tuple(figures)


def _share(window: tuple[Reading, Reading], service: str) -> float:
    """Return the processor time by time of all processes of a service."""
    before, after = window
    used = sum(
        after.processor_s[name] - before.processor_s[name] for name in after.processor_s if name.startswith(service)
    )
    return used / (after.at_s - before.at_s)


def table_of(figures: CellFigures) -> Table:
    """Return the figures of one cell as a table."""
    seen, tokens = figures.clients, figures.tokens_a_message
    received = "" if tokens is None else f", {tokens:.1f} tokens per message to a gateway"
    lines = (
        figures.label,
        f"speed {figures.speed:.0%} of that{received}; {seen.failures} failed, {figures.rejections} sent again",
        f"clients: {seen.events} events, {seen.requests} requests, first token p50 {seen.ttft_ms[0]:.0f} ms, p99 "
        f"{seen.ttft_ms[1]:.0f}; between events p50 {seen.gap_ms[0]:.0f}, p99 {seen.gap_ms[1]:.0f}, where groups "
        f"take {figures.plan.interval_s * 1000:.0f}",
    )
    table = Table(box=None, title="\n".join(lines), title_justify="left")
    for name in ("service", "idle", "measured", "cost", "at full speed", "of a core", "one core carries"):
        table.add_column(name, justify="left" if name == "service" else "right")
    for each in figures.services:
        table.add_row(
            each.name,
            f"{each.idle:.1%}",
            f"{each.share:.1%}",
            f"{1e6 * each.cost_s:.3g} µs/{each.unit}",
            f"{each.planned:,.0f}/s",
            f"{each.planned_share:.0%}",
            f"{each.carries:,.0f}/s",
        )
    return table


def keep(figures: CellFigures, path: Path) -> None:
    """Write the figures of one cell to a file of results."""
    command = shlex.join(["python", "-m", f"deploy.evaluation.experiments.{BENCHMARK}", *sys.argv[1:]])
    origin = Provenance(command, current_commit(), datetime.datetime.now(datetime.UTC).date().isoformat())
    sheet = ResultSheet(BENCHMARK, MODEL, 1, origin, figures.label)
    for each in figures.services:
        sheet.add(f"{each.name}: idle", 100 * each.idle, "%")
        sheet.add(f"{each.name}: per {each.unit}", 1e6 * each.cost_s, "µs")
        sheet.add(f"{each.name}: one core carries", each.carries, f"{each.unit}s/s")
        sheet.add(f"{each.name}: share of a core at full speed", 100 * each.planned_share, "%")
    sheet.add("speed", 100 * figures.speed, "%")
    sheet.add("tokens per message to a gateway", figures.tokens_a_message, "tokens")
    sheet.add("first token, p50", figures.clients.ttft_ms[0], "ms")
    sheet.add("first token, p99", figures.clients.ttft_ms[1], "ms")
    for percentile, gap_ms in zip(("p50", "p99"), figures.clients.gap_ms, strict=True):
        sheet.add(f"between events beyond a step, {percentile}", gap_ms - figures.plan.interval_s * 1000, "ms")
    write_results(path, sheet.results)


def main() -> None:
    """Measure a cell at each speed, print a table for each, and keep the figures if asked to."""
    planned = CellPlan("", "")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow-motion", type=float, nargs="+", default=[planned.slow_motion])
    for name in ("groups", "rows", "answer_tokens", "gateways", "tokenizers", "detokenizers"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(planned, name))
    parser.add_argument("--seconds", type=float, default=30.0, help="of the idle window and of the one under load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    arguments = parser.parse_args()
    allow_open_files(OPEN_FILES)
    names = ("groups", "rows", "answer_tokens", "gateways", "tokenizers", "detokenizers")
    plan = dataclasses.replace(planned, **{name: getattr(arguments, name) for name in names})
    for slow_motion in arguments.slow_motion:
        with running(dataclasses.replace(plan, slow_motion=slow_motion)) as cell:
            figures = asyncio.run(measure(cell, arguments.seconds))
        output_console().print(table_of(figures))
        if not figures.is_valid:
            raise SystemExit("The machine is too busy for this cell, so its figures are not kept: slow it down more.")
        if arguments.json:
            keep(figures, arguments.json)


if __name__ == "__main__":
    main()
