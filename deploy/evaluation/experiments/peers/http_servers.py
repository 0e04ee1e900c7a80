"""Tokens that servers stream per second of processor time.

Run as `python -m deploy.evaluation.experiments.peers.http_servers --server NAME=URL=PID`.

Each `--server NAME=URL=PID` is loaded in turn, several times; the time of the process and of all its children counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.workloads.random_text import random_sessions

STREAMS = 64
WAVES = 4
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 256


@dataclass
class PeerServer:
    """A server under load, and what was measured: tokens/s, tokens per second of processor time, tokens per event."""

    name: str
    url: str
    process: psutil.Process
    rates: list[float] = field(default_factory=list)
    per_core: list[float] = field(default_factory=list)
    per_event: list[float] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        """Return the processor time of all its processes."""
        return sum(
            one.cpu_times().user + one.cpu_times().system
            for one in (self.process, *self.process.children(recursive=True))
        )

    async def measure(self, repeat: int) -> None:
        """Load it once."""
        bench = await ServerUnderTest.connect(TargetOptions(self.url, prompt_form="ids"))
        try:
            await bench.warm_up(STREAMS, STREAMS, PROMPT_TOKENS, 16)
            sessions = random_sessions(STREAMS * WAVES, PROMPT_TOKENS, OUTPUT_TOKENS, name=f"servers/{repeat}")
            before = self.cpu_seconds()
            result = await bench.closed_loop(sessions, STREAMS)
            used = self.cpu_seconds() - before
        finally:
            await bench.close()
        assert not any(record.error for record in result.records), "a request failed"
        tokens = sum(record.output_tokens for record in result.records)
        self.rates.append(tokens / result.duration_s)
        self.per_core.append(tokens / used)
        self.per_event.append(tokens / sum(len(record.chunks_s) for record in result.records))


def server_of(text: str) -> PeerServer:
    """Return the server that NAME=URL=PID names."""
    name, url, pid = text.split("=")
    return PeerServer(name, url, psutil.Process(int(pid)))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="append", type=server_of, required=True, metavar="NAME=URL=PID")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for repeat in range(arguments.repeats):
        for server in arguments.server:
            asyncio.run(server.measure(repeat))
    for server in arguments.server:
        figures = {
            "output": (server.rates, "tok/s"),
            "output_per_core": (server.per_core, "tok/s"),
            "tokens_per_event": (server.per_event, "tokens"),
        }
        medians = {metric: round(statistics.median(values), 2) for metric, (values, _) in figures.items()}
        print(server.name, json.dumps(medians))  # noqa: T201  (a command's output)
        if arguments.json is not None:
            command = shlex.join(["python", "-m", "deploy.evaluation.experiments.peers.http_servers", *sys.argv[1:]])
            provenance = replace(Provenance.collect([]), command=command)
            sheet = ResultSheet("http-servers", "token source", 1, provenance, server.name)
            for metric, (values, unit) in figures.items():
                sheet.add_spread(metric, Spread.of(values), unit)
            write_results(arguments.json, sheet.results)


if __name__ == "__main__":
    main()
