"""The cost of a batch to interactive requests, and the cost of files and HTTP to a batch.

Run as `python -m deploy.evaluation.experiments.batches interference` and `… throughput`.

`interference` sends the same interactive load (open loop, Poisson arrivals, streamed) with and without a batch that has
more lines than there are rows. Both kinds alternate on one deployment, in pairs whose order alternates, too, so that
what the machine does meanwhile affects both alike. Reported is by how much the batch increases times to first token and
between tokens, over all rounds, and the spread of the rounds; and the batch's progress during the load.

`throughput` gives the same requests to scheduler and detokenizer as `pando bench offline` does, and as a batch, from
its creation to its end; they alternate, too. The upload of the file is not counted. Before each, the machine is idle
for long enough that batches run in whole steps.

With `--step-ms` the engine computes nothing and takes that long for each pass; without, it is the settings' model.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import orjson
from rich.table import Table

from common.types import CacheMode
from deploy.evaluation.bench.arrivals import gamma_arrivals
from deploy.evaluation.bench.deployments import LaunchedDeployment, add_setting_arguments
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.offline import evaluate
from deploy.evaluation.bench.pipeline_client import PipelineClient, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.workloads.random_text import random_sessions
from services.scheduler.core.batch_class import WATCHFUL_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.evaluation.bench.records import BenchRequest, LoadResult
    from deploy.evaluation.bench.results import Result

ENDPOINT = "/v1/completions"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
POLL_S = 0.1
TIMEOUT_S = 3600.0
RESULTS = Path(__file__).parents[1] / "results" / "batches.json"
# Loads before the measured ones.
WARM_UP_REQUESTS = 8


@dataclass(slots=True)
class PhaseSamples:
    """Times of interactive requests, in ms, and the lines of the batch that were done meanwhile."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    lines: int = 0

    def add(self, result: LoadResult) -> None:
        """Add the times of one load, of which no request may have failed."""
        for record in result.records:
            if record.error is not None or record.time_to_first_s is None:
                raise SystemExit(f"a request failed: {record.error}: {record.message}")
            self.first.append(record.time_to_first_s * 1000)
            self.gaps += [gap * 1000 for gap in record.gaps_s]
        self.seconds += result.duration_s

    def figures(self) -> dict[str, float]:
        """Return percentiles by name."""
        return {
            f"{name}_p{percent}": float(np.percentile(times, percent))
            for name, times in (("ttft", self.first), ("itl", self.gaps))
            for percent in (50, 99)
        }


class BatchApi:
    """The routes of files and batches."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        self._model = model

    async def upload(self, requests: Sequence[BenchRequest], prompts: PromptMaker) -> str:
        """Upload a file with a line for each request; return its id."""
        lines = []
        for number, request in enumerate(requests):
            prompt = prompts.prompt(request.segments)
            body = {
                "model": self._model,
                "prompt": prompt if isinstance(prompt, str) else prompt.tolist(),
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            lines.append({"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body})
        content = b"\n".join(map(orjson.dumps, lines))
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", content)}}
        return str((await self._ask("POST", "/v1/files", **form))["id"])

    async def create(self, file_id: str) -> str:
        """Create a batch; return its id."""
        body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        return str((await self._ask("POST", "/v1/batches", json=body))["id"])

    async def done(self, batch_id: str) -> int:
        """Return the number of lines that have been answered."""
        return int((await self._ask("GET", f"/v1/batches/{batch_id}"))["request_counts"]["completed"])

    async def begin(self, batch_id: str) -> None:
        """Wait until the first line of a batch has been answered."""
        while not await self.done(batch_id):  # noqa: ASYNC110  (a server cannot notify)
            await asyncio.sleep(POLL_S)

    async def end(self, batch_id: str) -> dict[str, Any]:
        """Wait until a batch has ended; return it."""
        while True:
            batch = await self._ask("GET", f"/v1/batches/{batch_id}")
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(POLL_S)

    async def cancel(self, batch_id: str) -> None:
        """Cancel a batch and wait until it has ended.

        Raises:
            SystemExit: it had ended before, so that a part of what was measured was not beside it.
        """
        if (await self._ask("GET", f"/v1/batches/{batch_id}"))["status"] in ENDED:
            raise SystemExit("the batch ended before the measurement did: give it more --lines")
        await self._ask("POST", f"/v1/batches/{batch_id}/cancel")
        await self.end(batch_id)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _ask(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        response = await self._http.request(method, path, **given)
        response.raise_for_status()
        return dict(response.json())


async def measure_interference(
    arguments: argparse.Namespace, url: str, rate: float
) -> list[tuple[PhaseSamples, PhaseSamples]]:
    """Return the samples without and with a batch, of each round."""
    bench = await ServerUnderTest.connect(TargetOptions(url))
    api = BatchApi(url, bench.model)
    await bench.warm_up(WARM_UP_REQUESTS, WARM_UP_REQUESTS, arguments.input_tokens, arguments.output_tokens)
    rounds = []
    try:
        for number in range(arguments.rounds):
            pair = (PhaseSamples(), PhaseSamples())
            for with_batch in (False, True) if number % 2 == 0 else (True, False):
                batch_id = None
                if with_batch:
                    batch_id = await _fill(api, arguments, f"{rate}/{number}")
                    before = await api.done(batch_id)
                pair[with_batch].add(await bench.open_loop(_load(arguments, rate, number, with_batch=with_batch)))
                if batch_id is not None:
                    pair[True].lines += await api.done(batch_id) - before
                    await api.cancel(batch_id)
            rounds.append(pair)
            sys.stderr.write(f"{rate:g}/s, round {number + 1}: {_changes([pair])}, {pair[True].lines} lines\n")
    finally:
        await api.close()
        await bench.close()
    return rounds


async def _fill(api: BatchApi, arguments: argparse.Namespace, name: str) -> str:
    """Start a batch and wait until its first line is done: all rows are taken then."""
    sessions = random_sessions(
        arguments.lines, arguments.line_input_tokens, arguments.line_output_tokens, length_spread=0.5, name=f"b{name}"
    )
    requests = [session.requests[0] for session in sessions]
    batch_id = await api.create(await api.upload(requests, PromptMaker()))
    await api.begin(batch_id)
    return batch_id


def _load(arguments: argparse.Namespace, rate: float, number: int, *, with_batch: bool) -> list[Any]:
    """Return the load of a round: lengths and times are those of its pair; prompts are not, because of the cache."""
    name = f"{rate}/{number}/{with_batch}"
    count = max(1, round(rate * arguments.seconds))
    sessions = random_sessions(
        count, arguments.input_tokens, arguments.output_tokens, length_spread=0.5, name=name, seed=number
    )
    times = gamma_arrivals(len(sessions), rate, seed=number)
    return [replace(session, arrival_s=time_s) for session, time_s in zip(sessions, times, strict=True)]


def _changes(rounds: Sequence[tuple[PhaseSamples, PhaseSamples]]) -> dict[str, float]:
    """Return by how many percent a batch increases each figure, over the samples of all rounds."""
    pooled = (PhaseSamples(), PhaseSamples())
    for pair in rounds:
        for all_of, samples in zip(pooled, pair, strict=True):
            all_of.first += samples.first
            all_of.gaps += samples.gaps
    without, with_batch = (samples.figures() for samples in pooled)
    return {name: round(100 * (with_batch[name] / without[name] - 1), 2) for name in without}


async def measure_throughput(
    arguments: argparse.Namespace, deployment: LaunchedDeployment
) -> list[tuple[float, float]]:
    """Return the output rates of both ways, in tokens per second, of each round: offline, batch."""
    addresses = deployment.address_of("scheduler"), deployment.address_of("detokenizer")
    bench = await ServerUnderTest.connect(TargetOptions(deployment.url))
    api = BatchApi(deployment.url, bench.model)
    await bench.warm_up(WARM_UP_REQUESTS, WARM_UP_REQUESTS, arguments.input_tokens, 16)
    rounds = []
    try:
        for number in range(arguments.rounds):
            rates = [0.0, 0.0]
            for as_batch in (False, True) if number % 2 == 0 else (True, False):
                sessions = random_sessions(
                    arguments.requests,
                    arguments.input_tokens,
                    arguments.output_tokens,
                    length_spread=0.5,
                    name=f"{number}/{as_batch}",
                    seed=number,
                )
                requests = [session.requests[0] for session in sessions]
                await asyncio.sleep(arguments.idle_s)
                run = _as_batch(api, requests) if as_batch else _offline(addresses, requests)
                rates[as_batch] = await run
            rounds.append((rates[0], rates[1]))
            share = rates[1] / rates[0]
            sys.stderr.write(f"round {number + 1}: {rates[0]:.1f} and {rates[1]:.1f} tokens/s, {share:.1%}\n")
    finally:
        await api.close()
        await bench.close()
    return rounds


async def _as_batch(api: BatchApi, requests: Sequence[BenchRequest]) -> float:
    file_id = await api.upload(requests, PromptMaker())
    started = time.monotonic()
    batch = await api.end(await api.create(file_id))
    seconds = time.monotonic() - started
    if batch["request_counts"]["completed"] != len(requests):
        raise SystemExit(f"lines failed: {batch}")
    return sum(request.output_tokens for request in requests) / seconds


async def _offline(addresses: tuple[str, str], requests: Sequence[BenchRequest]) -> float:
    async with PipelineClient(*addresses) as client:
        records = await client.start(schedule_requests(requests, PromptMaker(), 0.0, CacheMode.DEFAULT))
        await client.finish(TIMEOUT_S)
        return evaluate(requests, records).output_tokens_per_s


def interference(arguments: argparse.Namespace, deployment: LaunchedDeployment, provenance: Provenance) -> list[Result]:
    """Measure each rate; print a table, and return the results."""
    table = Table("load", "", "TTFT p50, ms", "p99", "ITL p50, ms", "p99", "lines/s", box=None)
    results: list[Result] = []
    for rate in arguments.rates:
        rounds = asyncio.run(measure_interference(arguments, deployment.url, rate))
        label = f"{rate:g} requests/s"
        sheet = ResultSheet("batches-interference", deployment.model, 1, provenance, label)
        changes = _changes(rounds)
        by_round = [_changes([pair]) for pair in rounds]
        for index, kind in enumerate(("without", "with a batch")):
            each = [pair[index].figures() for pair in rounds]
            spreads = {name: Spread.of([figures[name] for figures in each]) for name in each[0]}
            done = sum(pair[index].lines for pair in rounds) / sum(pair[index].seconds for pair in rounds)
            table.add_row(label, kind, *(f"{spread.median:.2f}" for spread in spreads.values()), f"{done:.2f}")
            for name, spread in spreads.items():
                sheet.add_spread(f"{name}, {kind}", spread, "ms")
        for name, change in changes.items():
            spread = Spread.of([each[name] for each in by_round])
            sheet.add_spread(f"{name} increase", replace(spread, median=change), "%")
        sheet.add("lines beside the load", done, "lines/s")
        table.add_row("", "increase", *(f"{change:+.1f} %" for change in changes.values()), "")
        results += sheet.results
    output_console().print(table)
    return results


def throughput(arguments: argparse.Namespace, deployment: LaunchedDeployment, provenance: Provenance) -> list[Result]:
    """Measure; print a table, and return the results."""
    rounds = asyncio.run(measure_throughput(arguments, deployment))
    sheet = ResultSheet("batches-throughput", deployment.model, 1, provenance)
    table = Table("", "tokens/s", box=None)
    for index, name in enumerate(("offline", "batch")):
        spread = Spread.of([rates[index] for rates in rounds])
        sheet.add_spread(name, spread, "tok/s")
        table.add_row(name, f"{spread.median:,.1f}")
    share = Spread.of([100 * batch / offline for offline, batch in rounds])
    sheet.add_spread("batch / offline", share, "%")
    table.add_row("batch / offline", f"{share.median:.1f} % ({share.low:.1f} to {share.high:.1f})")
    output_console().print(table)
    return sheet.results


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    beside = commands.add_parser("interference")
    beside.add_argument(
        "--rates", type=float, nargs="+", default=[1.0, 8.0], help="of arrivals per second (%(default)s)"
    )
    beside.add_argument("--lines", type=int, default=2000, help="more than the load gives time for (%(default)s)")
    beside.add_argument("--line-input-tokens", type=int, default=256, help="on average (%(default)s)")
    beside.add_argument("--line-output-tokens", type=int, default=128, help="on average (%(default)s)")
    alone = commands.add_parser("throughput")
    beside.add_argument("--seconds", type=float, default=30.0, help="of arrivals in a round (%(default)s)")
    alone.add_argument("--requests", type=int, default=2048, help="of a round (%(default)s)")
    alone.add_argument("--idle-s", type=float, default=WATCHFUL_S + 1, help="before each way (%(default)s)")
    for command, run in ((beside, interference), (alone, throughput)):
        command.set_defaults(run=run)
        command.add_argument("--rounds", type=int, default=6, help="of each kind (%(default)s)")
        command.add_argument("--input-tokens", type=int, default=256, help="on average (%(default)s)")
        command.add_argument("--output-tokens", type=int, default=64, help="on average (%(default)s)")
        command.add_argument("--step-ms", type=float, help="of an engine that computes nothing; absent: the model")
        command.add_argument(
            "--json", type=Path, metavar="FILE", help=f"keep the figures, for example in {RESULTS.name}"
        )
        add_setting_arguments(command)
    arguments = parser.parse_args(argv)
    defaults = [] if arguments.step_ms is None else ["model.load_format=fake"]
    deployment = LaunchedDeployment(arguments.config, arguments.overrides, defaults, fake_step_ms=arguments.step_ms)
    collected = Provenance.collect([])
    run_as = shlex.join(["python", "-m", "deploy.evaluation.experiments.batches", *(argv or sys.argv[1:])])
    with deployment:
        results = arguments.run(arguments, deployment, Provenance(run_as, collected.commit, collected.date))
    if arguments.json is not None:
        write_results(arguments.json, results)


if __name__ == "__main__":
    main()
