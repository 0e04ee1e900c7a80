"""Where a deployment's time goes while a load runs: processor time of every service, and how busy the GPU is.

`python -m deploy.evaluation.experiments.pipeline_shares -- pando bench serve --concurrency 256 --requests 256`

Runs the command after `--` and prints, for each service, its processor time as a share of the time that passed (100 %
is one core), and per token if `--tokens` says how many the load asks for. A service near 100 % is the next bottleneck,
as an event loop has one core. The GPU's share is the time in which any of its programs ran, as the driver counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.table import Table

from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.supervisor.state import find_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BENCHMARK = "pipeline-shares"
# How often the driver is asked, in milliseconds; its own window is longer.
ASKED_EVERY = 200


@dataclass(frozen=True, slots=True)
class Share:
    """Processor time of one service, in seconds, while `elapsed_s` passed."""

    name: str
    busy_s: float
    elapsed_s: float

    @property
    def percent(self) -> float:
        """Of one core."""
        return 100 * self.busy_s / self.elapsed_s


class GpuWatch:
    """Asks nvidia-smi how busy a GPU is, in a thread; without nvidia-smi there is nothing to see."""

    def __init__(self, name: str) -> None:
        """Watch GPU `name`: its number or UUID, as nvidia-smi has them."""
        self.percents: list[float] = []
        query = ["nvidia-smi", "-i", name, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen([*query, "-lms", str(ASKED_EVERY)], stdout=subprocess.PIPE, text=True)
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        if hasattr(self, "_process"):
            self._process.terminate()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self.percents.append(float(line))


def processor_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the processor time of each process and its children since they began."""
    found = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        found[name] = sum(time.user + time.system for time in times)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load and print the table; return the load's exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="HTTP port of the deployment, if several run here")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    parser.add_argument("--gpu", default=first, help="the GPU of rank 0, as nvidia-smi names it (%(default)s)")
    parser.add_argument("--tokens", type=int, help="output tokens of the load")
    parser.add_argument("--label", default="", help="name of the load in the results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("load", nargs="+", help="command that makes the load")
    options = parser.parse_args(arguments)
    state = find_state(port=options.port)
    pids = {name: service.pid for name, service in state.services.items() if service.pid is not None}
    before, watch, started = processor_seconds(pids), GpuWatch(options.gpu), time.perf_counter()
    code = subprocess.run(options.load, check=False).returncode
    elapsed = time.perf_counter() - started
    watch.stop()
    shares = [Share(name, used - before[name], elapsed) for name, used in processor_seconds(pids).items()]
    busy = statistics.mean(watch.percents) if watch.percents else None
    output_console().print(table(shares, busy, options.tokens))
    if options.json is not None:
        command = shlex.join(["python", "-m", "deploy.evaluation.experiments.pipeline_shares", *arguments])
        sheet = ResultSheet(BENCHMARK, state.model, 1, replace(Provenance.collect(()), command=command), options.label)
        for share in shares:
            sheet.add(f"{share.name} processor time", share.percent, "% of a core")
        if busy is not None:
            sheet.add("device busy", busy, "%")
        write_results(options.json, sheet.results)
    return code


def table(shares: Sequence[Share], device_percent: float | None, tokens: int | None) -> Table:
    """Return the shares, for people."""
    elapsed = shares[0].elapsed_s if shares else 0.0
    found = Table(title=f"{elapsed:.1f} s, the load's start and end included", title_justify="left")
    found.add_column("part")
    for name in ("seconds", "% of a core", "µs per token"):
        found.add_column(name, justify="right")
    for share in sorted(shares, key=lambda share: -share.busy_s):
        per_token = f"{share.busy_s / tokens * 1e6:.1f}" if tokens else ""
        found.add_row(share.name, f"{share.busy_s:.2f}", f"{share.percent:.1f}", per_token)
    if device_percent is not None:
        found.add_row("device", f"{elapsed * device_percent / 100:.2f}", f"{device_percent:.1f} (of the GPU)", "")
    return found


if __name__ == "__main__":
    sys.exit(main())
