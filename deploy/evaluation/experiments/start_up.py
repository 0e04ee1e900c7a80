"""The time from the start of `pando up` to the first answer, and from a service's start until it serves.

Run as `python -m deploy.evaluation.experiments.start_up`.

A deployment serves the bundled model on CPUs. Then each service of another one is killed and started again, as after a
crash; its peers, whose engine makes tokens up, go on. Besides the wall time there is the processor time that the
processes have used until then, which a busy machine changes less, and the part of it that importing a service's modules
takes, or the memory of the deployment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
from rich.table import Table

from common.rpc.channel import is_serving, open_channel
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.supervisor.layout import free_port
from tests.e2e.groups import Tier
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

BENCHMARK = "start_up"
INTERVAL_S = 0.01
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class StartedService:
    """A service of the deployment."""

    process: str
    module: str
    health: str
    """The service's name in its health service."""
    start: Callable[[Tier], None]


SERVICES = (
    StartedService("scheduler-0", "services.scheduler", "pando.v1.Scheduler", lambda tier: tier.start_scheduler(0)),
    StartedService("tokenizer", "services.tokenizer", "pando.v1.Tokenizer", Tier.start_tokenizer),
    StartedService("detokenizer", "services.detokenizer", "pando.v1.Detokenizer", Tier.start_detokenizer),
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A way to run `pando up`."""

    label: str
    arguments: tuple[str, ...]


DEPLOYMENTS = (
    Deployment("deployment, one worker", ()),
    Deployment("deployment, four workers", ("--roles", "prefill=2,decode=2")),
)
QUESTION = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """Time, processor time and memory of a deployment until its first answer."""

    wall_s: float
    processor_s: float
    memory_mib: float
    """Of all processes, shared memory counted once."""


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start."""

    wall_s: float
    processor_s: float
    import_s: float
    """Of the processor time; measured in a process of its own."""


def main() -> None:
    """Measure, print a table, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="of the services: a model directory or hub name other than the bundled one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    arguments = parser.parse_args()
    answers = {each: [first_answer(each) for _ in range(arguments.repeats)] for each in DEPLOYMENTS}
    settings = {} if arguments.model is None else {"model.reference": arguments.model}
    with tempfile.TemporaryDirectory(prefix="pando-start-up-") as folder:
        tier = Tier(Path(folder), settings, groups=(0,))
        try:
            tier.start()
            measured = {
                service: [measure(tier, Path(folder), service) for _ in range(arguments.repeats)]
                for service in SERVICES
            }
        finally:
            tier.stop()
    output_console().print(table_of_answers(answers))
    output_console().print(table_of(measured))
    if arguments.json:
        keep(answers, measured, arguments.json)


def first_answer(deployment: Deployment) -> FirstAnswer:
    """Start a deployment, wait for its first answer, and stop it."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "deploy.cli", "up", "--gateway.port", str(port), *deployment.arguments]
    with tempfile.TemporaryDirectory(prefix="pando-start-up-") as folder:
        environ = {**os.environ, "XDG_RUNTIME_DIR": folder}
        started = time.monotonic()
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: is_answered(f"http://127.0.0.1:{port}/v1/completions"), DEADLINE_S, step_s=INTERVAL_S)
            wall_s = time.monotonic() - started
            top = psutil.Process(process.pid)
            processes = [top, *top.children(recursive=True)]
            memory = sum(each.memory_full_info().pss for each in processes)
            return FirstAnswer(wall_s, sum(processor_s(each.pid) for each in processes), memory / 2**20)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_S)


def is_answered(url: str) -> bool:
    """Ask the question; return whether it was answered."""
    try:
        return httpx.post(url, json=QUESTION, timeout=DEADLINE_S).is_success
    except httpx.TransportError:
        return False


def measure(tier: Tier, folder: Path, service: StartedService) -> Start:
    """Kill a service, start it again and wait until it serves."""
    tier.end(service.process, signal.SIGKILL)
    path = folder / f"{service.process}.sock"
    path.unlink(missing_ok=True)
    started = time.monotonic()
    service.start(tier)
    # A channel that fails to connect waits before it tries again.
    wait_until(path.exists, DEADLINE_S, step_s=INTERVAL_S)
    asyncio.run(until_serving(f"unix:{path}", service.health))
    wall_s = time.monotonic() - started
    return Start(wall_s, processor_s(tier.pid(service.process)), import_s(service.module))


async def until_serving(address: str, service: str) -> None:
    """Wait until a service reports that it serves.

    Raises:
        TimeoutError: it does not within `DEADLINE_S`.
    """
    async with asyncio.timeout(DEADLINE_S), open_channel(address) as channel:
        while not await is_serving(channel, service):  # noqa: ASYNC110  (a service cannot notify before it serves)
            await asyncio.sleep(INTERVAL_S)


def processor_s(pid: int) -> float:
    """Return the processor time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def import_s(module: str) -> float:
    """Return the processor time of an interpreter that imports a service and does nothing else."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {module}.__main__"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table_of_answers(answers: dict[Deployment, list[FirstAnswer]]) -> Table:
    """Return the medians as a table."""
    table = Table(box=None)
    for name in ("pando up", "wall s", "processor s", "memory MiB"):
        table.add_column(name, justify="left" if name == "pando up" else "right")
    for deployment, each in answers.items():
        wall, processor, memory = spreads(each)
        table.add_row(deployment.label, f"{wall.median:.2f}", f"{processor.median:.2f}", f"{memory.median:,.0f}")
    return table


def spreads(answers: list[FirstAnswer]) -> tuple[Spread, Spread, Spread]:
    """Return wall time and processor time in seconds, and memory in MiB."""
    return (
        Spread.of([each.wall_s for each in answers]),
        Spread.of([each.processor_s for each in answers]),
        Spread.of([each.memory_mib for each in answers]),
    )


def table_of(measured: dict[StartedService, list[Start]]) -> Table:
    """Return the medians as a table."""
    table = Table(box=None)
    for name in ("service", "wall s", "processor s", "imports s"):
        table.add_column(name, justify="left" if name == "service" else "right")
    for service, starts in measured.items():
        table.add_row(service.module, *(f"{value:.2f}" for value in medians(starts)))
    return table


def medians(starts: list[Start]) -> tuple[float, float, float]:
    """Return the medians of wall time, processor time and that of imports, seconds."""
    return (
        statistics.median(start.wall_s for start in starts),
        statistics.median(start.processor_s for start in starts),
        statistics.median(start.import_s for start in starts),
    )


def keep(answers: dict[Deployment, list[FirstAnswer]], measured: dict[StartedService, list[Start]], path: Path) -> None:
    """Write the figures where results are kept."""
    collected = Provenance.collect([])
    command = shlex.join(["python", "-m", "deploy.evaluation.experiments.start_up", *sys.argv[1:]])
    provenance = Provenance(command, collected.commit, collected.date)
    results = []
    for deployment, each in answers.items():
        sheet = ResultSheet(BENCHMARK, str(QUESTION["model"]), 1, provenance, deployment.label)
        wall, processor, memory = spreads(each)
        sheet.add_spread("first_answer_wall", wall, "s")
        sheet.add_spread("first_answer_processor", processor, "s")
        sheet.add_spread("first_answer_memory", memory, "MiB")
        results += sheet.results
    for service, starts in measured.items():
        sheet = ResultSheet(BENCHMARK, "fake", 1, provenance, service.module)
        for metric, value in zip(("wall", "processor", "imports"), medians(starts), strict=True):
            sheet.add(f"start_up_{metric}", round(value, 3), "s")
        results += sheet.results
    write_results(path, results)


if __name__ == "__main__":
    main()
