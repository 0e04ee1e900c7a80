"""Times of an engine's decode steps on a GPU, without gRPC, and the part of them in which the device idles.

`python -m deploy.evaluation.experiments.decode_steps deploy/evaluation/shapes/qwen3-0.6b --rows 1 256 --prompt 500`

With `--tp 2`, two tensor-parallel ranks take the first two GPUs, with `--pp 2` two stages of a pipeline; the rank that
samples prints. With stages, rows decode in as many micro-batches, if there are enough, and a step is one of every row.
With `--uncaptured`, passes run program by program instead of in CUDA graphs. With `--formats`, weights or keys and
values are in one format after another; `bfloat16` leaves all as the shape says. Prompts are those of the rows that are
added last, in passes of about 8,192 tokens.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import shlex
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from common.steps import EngineSpec, MicroBatch, PrefillChunk, RowOpen, StepPlan
from common.types import RequestId, RowSlot, SamplingParams, StepId
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.experiments.formats import FORMATS, shape_in
from deploy.supervisor.layout import free_port
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.profiler_util import FunctionEvent

STEPS = 16
PLANS = 8
# Tokens of one pass of prompts.
PASS_TOKENS = 8192
NAMES = 12
# Formats that a shape's own config.json does not name.
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8"},
    "fp8-kv": {"kv_dtype": "fp8"},
}


class Driver:
    """Feeds one engine with plans."""

    def __init__(self, spec: EngineSpec, *, graphs: bool = True) -> None:
        """Load what `spec` says on the GPU of its rank; passes are captured with `graphs`."""
        options = RunnerOptions(device="cuda", device_index=spec.rank, graphs=graphs)
        self._engine = torch_engine(lambda spec, report: load_decoder(spec, report, options))
        capacity = self._engine.configure(spec, lambda _share, _stage: None)
        self.page_size, self.pages = capacity.page_size, capacity.device_pages
        # Bytes of one embedding of an image; 0: the model sees none.
        self.embedding_bytes = capacity.embedding_bytes
        self._next_step = 1
        self.opened = 0

    def fill(self, rows: int, prompt: int, tokens: int) -> None:
        """Open rows of `prompt` random ids until there are `rows`, with pages for `tokens` more."""
        pages = -(-(prompt + tokens) // self.page_size)
        ids = np.random.default_rng(0).integers(0, 10_000, (rows, prompt)).astype(np.int32)
        for first in range(self.opened, rows, max(1, PASS_TOKENS // prompt)):
            opens = tuple(
                RowOpen(
                    row=RowSlot(row),
                    request_id=RequestId(f"row-{row}"),
                    token_ids=ids[row],
                    prompt_tokens=prompt,
                    computed_tokens=0,
                    pages=np.arange(row * pages, (row + 1) * pages, dtype=np.int32),
                    sampling=SamplingParams(temperature=0.6, seed=row),
                    max_total_tokens=prompt + tokens,
                )
                for row in range(first, min(rows, first + max(1, PASS_TOKENS // prompt)))
            )
            self.run(StepPlan(self.step(), opens=opens, prefills=tuple(PrefillChunk(o.row, 0, prompt) for o in opens)))
        self.opened = max(rows, self.opened)

    def decode(self, plans: int, stages: int = 1) -> float:
        """Run plans of STEPS steps, or of one with stages, as these are served; return the seconds of one step."""
        micro_batches, steps = min(stages, self.opened), STEPS if stages == 1 else 1
        started = time.perf_counter()
        for _ in range(plans * STEPS // steps):
            for index in range(micro_batches):
                self.run(StepPlan(self.step(), steps=steps, micro_batch=MicroBatch(index, micro_batches)))
        self.settle()
        return (time.perf_counter() - started) / (plans * STEPS)

    def close(self) -> None:
        """Free the device's memory."""
        self._engine.close()
        gc.collect()
        torch.cuda.empty_cache()

    def run(self, plan: StepPlan) -> None:
        """Run one plan; its tokens are dropped."""
        self._engine.execute(plan, lambda _result: None)

    def settle(self) -> None:
        """Wait until all that was asked for is done."""
        self._engine.settle(lambda: False)
        torch.cuda.synchronize()

    def step(self) -> StepId:
        """Return the next plan's number."""
        self._next_step += 1
        return StepId(self._next_step)


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Return which part of the time from the first start to the last end lies in none of `spans`, sorted by start."""
    end, idle = spans[0][0], 0.0
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / (end - spans[0][0])


def measure(arguments: argparse.Namespace, rank: int, rendezvous: str, label: str | None = None) -> None:
    """Run the steps as one rank; the one that samples prints."""
    most = max(arguments.rows)
    spec = EngineSpec(
        arguments.model, load_format="dummy", max_rows=most, max_context=4096, max_step_tokens=PASS_TOKENS + most,
        rank=rank, world_size=arguments.tp * arguments.pp, stages=arguments.pp, rendezvous=rendezvous,
        quantization=arguments.quantization, kv_dtype=arguments.kv_dtype, deterministic=arguments.deterministic,
    )  # fmt: skip
    driver = Driver(spec, graphs=not arguments.uncaptured)
    name = f"{Path(arguments.model).name} (dummy{', fp8' if arguments.quantization == 'fp8' else ''})"
    command = shlex.join(["python", "-m", "deploy.evaluation.experiments.decode_steps", *sys.argv[1:]])
    parts = [
        label,
        f"{arguments.pp} stages" if arguments.pp > 1 else None,
        "without graphs" if arguments.uncaptured else None,
    ]
    label = ", ".join(part for part in parts if part) or None
    sheet = ResultSheet("decode-steps", name, arguments.tp, replace(Provenance.collect(()), command=command), label)
    for rows in sorted(arguments.rows):
        # Rows that are there already go on, and need pages for all that follows.
        opened, started = driver.opened, time.perf_counter()
        driver.fill(rows, arguments.prompt, tokens=STEPS * (PLANS + 8) * len(arguments.rows))
        driver.settle()
        rate = (rows - opened) * arguments.prompt / (time.perf_counter() - started)
        if spec.samples and rows == most:
            sys.stdout.write(f"prompts of {rows - opened} rows: {rate:.0f} tokens/s\n")
            sheet.add(f"prompts of {rows - opened} rows", rate, "tok/s")
        driver.decode(2, arguments.pp)
        seconds = driver.decode(PLANS, arguments.pp)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            driver.decode(2, arguments.pp)
        if spec.samples:
            sys.stdout.write(f"{rows} rows: {seconds * 1e6:.0f} us per step, {rows / seconds:.0f} tokens/s\n")
            sheet.add(f"step of {rows} rows", seconds * 1e6, "us")
            sheet.add(f"idle share, {rows} rows", 100 * show(profiled), "%")
    if spec.samples and arguments.json is not None:
        write_results(arguments.json, sheet.results)
    driver.close()


def programs_of(profiled: profile) -> list[FunctionEvent]:
    """Return the programs that ran on the device."""
    return [event for event in profiled.events() or () if event.device_type.name == "CUDA"]  # type: ignore[no-untyped-call]  # torch leaves it untyped


def spans_of(profiled: profile) -> list[tuple[float, float]]:
    """Return start and end of each, in microseconds, in the order of starts."""
    return sorted((event.time_range.start, event.time_range.end) for event in programs_of(profiled))


def show(profiled: profile) -> float:
    """Print the idle share and the longest programs; return the share."""
    events = programs_of(profiled)
    idle = idle_share(spans_of(profiled))
    sys.stdout.write(f"idle between programs: {idle:.2%}\n")
    times: Counter[str] = Counter()
    for event in events:
        times[event.name] += event.time_range.end - event.time_range.start
    for name, total in times.most_common(NAMES):
        sys.stdout.write(f"{total / (2 * STEPS):10.1f} us per step  {name[:80]}\n")
    sys.stdout.flush()
    return idle


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on as many GPUs as there are ranks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with config.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[256], help="how many decode at once, one after another")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of each row before it decodes")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--uncaptured", action="store_true", help="without CUDA graphs")
    parser.add_argument("--quantization", choices=("auto", "fp8"), default="auto", help="of the layers' matrices")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="of keys and values")
    parser.add_argument("--deterministic", action="store_true", help="with the programs of deterministic mode")
    parser.add_argument("--formats", nargs="+", choices=(*SETTINGS, *FORMATS), help="one after another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    arguments = parser.parse_args(argv)
    shape = Path(arguments.model)
    if not arguments.formats:
        run_ranks(arguments)
    for name in arguments.formats or ():
        changed = argparse.Namespace(**{**vars(arguments), **SETTINGS.get(name, {})})
        sys.stdout.write(f"{shape.name}, {name}\n")
        if name in SETTINGS:
            run_ranks(changed, name)
            continue
        with shape_in(shape, name) as directory:
            changed.model = str(directory)
            run_ranks(changed, name)
    return 0


def run_ranks(arguments: argparse.Namespace, label: str | None = None) -> None:
    """Measure as all ranks, rank 0 in this process."""
    rendezvous = f"127.0.0.1:{free_port('127.0.0.1')}"
    others = [
        multiprocessing.get_context("spawn").Process(target=measure, args=(arguments, rank, rendezvous, label))
        for rank in range(1, arguments.tp * arguments.pp)
    ]
    for other in others:
        other.start()
    measure(arguments, 0, rendezvous, label)
    for other in others:
        other.join()


if __name__ == "__main__":
    sys.exit(main())
