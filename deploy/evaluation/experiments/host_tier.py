"""Loading KV pages from the host against computing them again: `python -m deploy.evaluation.experiments.host_tier`.

For some lengths: how long a prefill of so many tokens takes, and how long the copy of their pages to the device, alone
and beside rows that decode; how much slower these are meanwhile; and the length from which loading pays. Pages are
copied in the order of a fresh pool (runs) and in a random one (scattered), as they are after a while. Of a model with
recurrent layers, each copy includes a snapshot of their states, as that of a prefix does.

On a GPU, with any config.json:

    python -m deploy.evaluation.experiments.host_tier --device cuda --model DIR --load-format dummy \
        --rows 64 --lengths 1024 8192
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from common.steps import EngineSpec
from common.transfers import Transfer, TransferDirection, TransferId
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, Result, ResultSheet, write_results
from services.worker.engine.host import limit_spinning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model_runner import ModelRunner

LOAD, BACKUP = TransferDirection.HOST_TO_DEVICE, TransferDirection.DEVICE_TO_HOST
BENCHMARK = "host-tier"
# Of the decode batch; enough that a row's KV is more than a page or two.
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class LengthCosts:
    """Costs of one length, in milliseconds; the bandwidths are those of the copies alone, in GB/s."""

    tokens: int
    order: str
    prefill_ms: Spread
    load_ms: Spread
    backup_ms: Spread
    load_beside_ms: Spread
    backup_beside_ms: Spread
    step_beside_load_ms: Spread
    step_beside_backup_ms: Spread
    bytes_copied: int

    @property
    def speedup(self) -> float:
        """Rate of loading relative to that of computing, both alone."""
        return self.prefill_ms.median / self.load_ms.median

    def bandwidth(self, spread: Spread) -> float:
        """Return GB/s."""
        return self.bytes_copied / spread.median / 1e6


class HostTierBench:
    """A loaded model with both tiers, whose first pages belong to rows that decode."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Load it; `arguments` are those of the command line."""
        from services.worker.engine.backends import RunnerOptions
        from services.worker.engine.loader import load_decoder
        from services.worker.engine.measuring.measurements import random_batch

        self._make_batch = random_batch
        longest = -(-max(arguments.lengths) // arguments.page_size)
        own = arguments.rows * -(-CONTEXT // arguments.page_size)
        spec = EngineSpec(
            arguments.model,
            load_format=arguments.load_format,
            dtype=arguments.dtype,
            page_size=arguments.page_size,
            max_step_tokens=max(arguments.lengths),
            device_pages=own + longest,
            host_pages=longest,
            snapshots=1,
            host_snapshots=1,
        )
        options = RunnerOptions(device=arguments.device, threads=arguments.threads)
        self.runner: ModelRunner = load_decoder(spec, lambda *_: None, options)
        self.decode = self._make_batch(self.runner.capacity, self.runner.device, [(CONTEXT - 1, 1)] * arguments.rows)
        self._first_page = own
        self._repeats = arguments.repeats
        self._next = 1
        self._step(self.decode)

    def step_ms(self) -> Spread:
        """Return the time of a decode step while nothing is copied."""
        return self._repeat(lambda: self._step(self.decode))

    def line(self, tokens: int, order: str) -> LengthCosts:
        """Measure one length."""
        beside_load = [self._beside(LOAD, tokens, order) for _ in range(self._repeats)]
        beside_backup = [self._beside(BACKUP, tokens, order) for _ in range(self._repeats)]
        prompt = self._make_batch(self.runner.capacity, self.runner.device, [(0, tokens)])
        host = self.runner.host_pool
        assert host is not None
        return LengthCosts(
            tokens=tokens,
            order=order,
            prefill_ms=self._repeat(lambda: self._step(prompt)),
            load_ms=self._repeat(lambda: self._alone(LOAD, tokens, order)),
            backup_ms=self._repeat(lambda: self._alone(BACKUP, tokens, order)),
            load_beside_ms=Spread.of([total for total, _ in beside_load]),
            backup_beside_ms=Spread.of([total for total, _ in beside_backup]),
            step_beside_load_ms=Spread.of([step for _, step in beside_load]),
            step_beside_backup_ms=Spread.of([step for _, step in beside_backup]),
            bytes_copied=-(-tokens // self.runner.capacity.page_size) * host.page_bytes + self._state_bytes,
        )

    @property
    def _state_bytes(self) -> int:
        """Bytes of a snapshot; 0 without recurrent layers."""
        states = self.runner.capacity.recurrent_states
        return 0 if states is None else states.row_bytes

    def _repeat(self, measure: object) -> Spread:
        assert callable(measure)
        measure()
        return Spread.of([measure() for _ in range(self._repeats)])

    def _step(self, batch: ForwardBatch) -> float:
        """Run a pass as an engine does, to the tokens' arrival; return its milliseconds."""
        started = time.perf_counter()
        self.runner.forward(batch).argmax(dim=-1).tolist()
        return (time.perf_counter() - started) * 1e3

    def _begin(self, direction: TransferDirection, tokens: int, order: str) -> None:
        transfers = self.runner.transfers
        assert transfers is not None
        pages = np.arange(-(-tokens // self.runner.capacity.page_size), dtype=np.int32)
        random = np.random.default_rng(0)
        device = pages if order == "runs" else random.permutation(pages)
        host = pages if order == "runs" else random.permutation(pages)
        slots = np.arange(bool(self._state_bytes), dtype=np.int32)
        pages = device + np.int32(self._first_page)
        transfers.begin(
            [Transfer(TransferId(self._next), direction, pages, host, device_snapshots=slots, host_snapshots=slots)]
        )
        self._next += 1

    def _alone(self, direction: TransferDirection, tokens: int, order: str) -> float:
        started = time.perf_counter()
        self._begin(direction, tokens, order)
        assert self.runner.transfers is not None
        while not self.runner.transfers.wait():
            pass
        return (time.perf_counter() - started) * 1e3

    def _beside(self, direction: TransferDirection, tokens: int, order: str) -> tuple[float, float]:
        """Decode until a copy is done; return its milliseconds and those of a step with what the copy adds to it."""
        assert self.runner.transfers is not None
        started = last = time.perf_counter()
        self._begin(direction, tokens, order)
        steps: list[float] = []
        is_done = False
        while not is_done:
            self._step(self.decode)
            is_done = bool(self.runner.transfers.poll())
            now = time.perf_counter()
            steps.append((now - last) * 1e3)
            last = now
        return (last - started) * 1e3, statistics.median(steps)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m deploy.evaluation.experiments.host_tier", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="(%(default)s)")
    parser.add_argument("--load-format", default="auto", help="auto, safetensors, gguf or dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256, 1024, 2048], help="tokens")
    parser.add_argument("--rows", type=int, default=4, help="that decode meanwhile (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args(argv)
    limit_spinning()
    bench = HostTierBench(arguments)
    step_ms = bench.step_ms()
    lines = [bench.line(tokens, order) for order in ("runs", "scattered") for tokens in arguments.lengths]
    console = output_console()
    console.print(table(lines, step_ms))
    console.print(
        f"calibrated at start-up: {bench.runner.capacity.prefill_tokens_per_s:,.0f} tokens/s of prefill, ", end=""
    )
    console.print(f"{bench.runner.capacity.load_bytes_per_s / 1e9:.2f} GB/s from the host")
    if arguments.json is not None:
        command = shlex.join([parser.prog, *(sys.argv[1:] if argv is None else argv)])
        provenance = replace(Provenance.collect(()), command=command)
        write_results(arguments.json, results(lines, step_ms, arguments, provenance))


def table(lines: Sequence[LengthCosts], step_ms: Spread) -> Table:
    """Return all lines, for people."""
    found = Table(title=f"ms, medians; a decode step alone takes {step_ms.median:.1f} ms", title_justify="left")
    for name in (
        "tokens", "pages", "prefill", "load", "GB/s", "times faster", "load, decoding", "step", "backup", "GB/s",
        "backup, decoding", "step",
    ):  # fmt: skip
        found.add_column(name, justify="right")
    for line in lines:
        found.add_row(
            f"{line.tokens:,}", line.order, f"{line.prefill_ms.median:.1f}", f"{line.load_ms.median:.2f}",
            f"{line.bandwidth(line.load_ms):.2f}", f"{line.speedup:.1f}", f"{line.load_beside_ms.median:.1f}",
            f"{line.step_beside_load_ms.median:.1f}", f"{line.backup_ms.median:.2f}",
            f"{line.bandwidth(line.backup_ms):.2f}", f"{line.backup_beside_ms.median:.1f}",
            f"{line.step_beside_backup_ms.median:.1f}",
        )  # fmt: skip
    return found


def results(
    lines: Sequence[LengthCosts], step_ms: Spread, arguments: argparse.Namespace, provenance: Provenance
) -> list[Result]:
    """Return everything in the form that is kept; the label says device, length and order."""
    device = "cuda" if arguments.device == "cuda" else "cpu"
    sheet = ResultSheet(BENCHMARK, arguments.model, 1, provenance, f"{device}, {arguments.rows} rows")
    sheet.add_spread("decode step", step_ms, "ms")
    found = list(sheet.results)
    for line in lines:
        sheet = ResultSheet(BENCHMARK, arguments.model, 1, provenance, f"{device}, {line.tokens} tokens, {line.order}")
        for name, spread in (
            ("prefill", line.prefill_ms),
            ("load", line.load_ms),
            ("backup", line.backup_ms),
            ("load beside decoding", line.load_beside_ms),
            ("backup beside decoding", line.backup_beside_ms),
            ("decode step beside a load", line.step_beside_load_ms),
            ("decode step beside a backup", line.step_beside_backup_ms),
        ):
            sheet.add_spread(name, spread, "ms")
        sheet.add("load bandwidth", line.bandwidth(line.load_ms), "GB/s")
        sheet.add("backup bandwidth", line.bandwidth(line.backup_ms), "GB/s")
        sheet.add("prefill / load", line.speedup, "x")
        found += sheet.results
    return found


if __name__ == "__main__":
    main()
