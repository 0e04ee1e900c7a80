"""How long decode steps of an engine take on a GPU, without gRPC, and how much of that the device idles.

`python -m tests.benchmarks.decode_steps tests/benchmarks/shapes/qwen3-0.6b --rows 256 --prompt 500`
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from common.steps import EngineSpec, PrefillChunk, RowOpen, StepPlan
from common.types import RequestId, RowSlot, SamplingParams, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.torch_engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 16
PLANS = 8
# Tokens of one pass of prompts.
PASS_TOKENS = 8192
NAMES = 12


class Driver:
    """Feeds one engine with plans."""

    def __init__(self, model: str, rows: int) -> None:
        """Load dummy weights."""
        self._engine = TorchEngine(lambda spec, report: ModelRunner.load(spec, report, RunnerOptions(device="cuda")))
        spec = EngineSpec(
            model, load_format="dummy", max_rows=rows, max_context=4096, max_step_tokens=PASS_TOKENS + rows
        )
        self._page_size = self._engine.configure(spec, lambda _share, _stage: None).page_size
        self._next_step = 1

    def fill(self, rows: int, prompt: int, tokens: int) -> None:
        """Open `rows` rows of `prompt` random ids, with pages for `tokens` more."""
        pages = -(-(prompt + tokens) // self._page_size)
        ids = np.random.default_rng(0).integers(0, 10_000, (rows, prompt)).astype(np.int32)
        for first in range(0, rows, max(1, PASS_TOKENS // prompt)):
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
            self.run(StepPlan(self._step(), opens=opens, prefills=tuple(PrefillChunk(o.row, 0, prompt) for o in opens)))

    def decode(self, plans: int) -> float:
        """Run plans of STEPS steps; return the seconds of one step."""
        started = time.perf_counter()
        for _ in range(plans):
            self.run(StepPlan(self._step(), steps=STEPS))
        self._engine.settle(lambda: False)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / (plans * STEPS)

    def run(self, plan: StepPlan) -> None:
        """Run one plan; its tokens are nobody's."""
        self._engine.execute(plan, lambda _result: None)

    def _step(self) -> StepId:
        self._next_step += 1
        return StepId(self._next_step)


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Return which part of the time from the first start to the last end lies in none of `spans`, sorted by start."""
    end, idle = spans[0][0], 0.0
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / (end - spans[0][0])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the time of a step, the idle share and the longest programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with config.json")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=500, help="tokens of each row before it decodes")
    arguments = parser.parse_args(argv)
    driver = Driver(arguments.model, arguments.rows)
    driver.fill(arguments.rows, arguments.prompt, tokens=STEPS * (PLANS + 8))
    driver.decode(2)
    seconds = driver.decode(PLANS)
    sys.stdout.write(f"{seconds * 1e6:.0f} us per step, {arguments.rows / seconds:.0f} tokens/s\n")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        driver.decode(2)
    events = [event for event in profiled.events() or () if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    sys.stdout.write(f"idle between programs: {idle_share(spans):.2%}\n")
    times: Counter[str] = Counter()
    for event in events:
        times[event.name] += event.time_range.end - event.time_range.start
    for name, total in times.most_common(NAMES):
        sys.stdout.write(f"{total / (2 * STEPS):10.1f} us per step  {name[:80]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
