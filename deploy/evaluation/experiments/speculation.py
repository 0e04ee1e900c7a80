"""Speculative decoding: tokens per pass, and tokens per second with drafts and without, taken in turns.

`python -m deploy.evaluation.experiments.speculation --json deploy/evaluation/results/speculation.json` lets the bundled
model answer prompts that repeat themselves more or less, one stream at a time, and then several together.

`python -m deploy.evaluation.experiments.speculation deploy/evaluation/shapes/llama-3.1-8b --rows 1 8 64 256` measures a
shape with dummy weights. Its rows may sample one token only, and each token of a draft is that one with the
probability of `--acceptance`: so drafts are accepted as often as asked. Figures are printed, and written, after each
run; no round of a workload or of a number of rows begins that would end after `--time-limit`.

The scheduler's core and the engine run in one process, without gRPC.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from common.models import resolve_model
from common.settings import SchedulerSettings, SpeculationSettings
from common.steps import EngineSpec
from common.tokenization.text_model import load_text_model
from common.types import (
    ReplyTo,
    RequestId,
    RequestOptions,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    Subject,
    SubscriberId,
    View,
)
from deploy.evaluation.bench.partial_results import Deadline, PartialResults, report, within_time
from services.scheduler.cache.factory import make_allocator, make_cache
from services.scheduler.core.config import resolve_core
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.drafts import DraftSources, Guess, Origin
from services.scheduler.policy.policies import make_order
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.steps import EngineCapacity, StepPlan
    from common.types import RowSlot
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.speculation import GuessesTokens
    from services.worker.engine.execution.engine import ModelEngine

MODEL = "smollm2-135m-instruct"
REPEATS = 3
# For closing the engine.
RESERVE_S = 5.0
# Of all workloads together.
STREAMS = (5, 15)
Method = Literal["off", "ngram"]
# The token that rows of a shape sample, and a wrong one.
RIGHT, WRONG = 1000, 1001

_NOTES = """The harbour opened in 1874 and was widened twice, in 1902 and in 1931. Its three cranes lift 12, 20 and 45
tonnes. Ships with a draught of more than nine metres wait for the tide at the outer buoy. Pilots board from a launch
that leaves the northern mole every hour, and every half hour between May and September."""
_CODE = '''def read_rows(path, separator=","):
    """Return the rows of a file as lists of strings."""
    rows = []
    with open(path) as file:
        for line in file:
            rows.append(line.strip().split(separator))
    return rows
'''
_RECORDS = "\n".join(
    f'{{"station": "{name}", "temperature_celsius": {number}, "wind_kilometers_per_hour": {2 * number}}}'
    for number, name in enumerate(["Oslo", "Turin", "Porto", "Ghent", "Krakow", "Malmo"], 11)
)
WORKLOADS = {
    "copy": f"Repeat the following text exactly, word for word:\n\n{_NOTES}",
    "edit": f"Rewrite the following text with 1874 replaced by 1875, and change nothing else:\n\n{_NOTES}",
    "code": f"Add a parameter `encoding` to this function and show the whole function:\n\n```python\n{_CODE}```",
    "json": f"Write these records as one JSON array:\n\n{_RECORDS}",
    "chat": "Why is the sky blue? Explain it to a child in a few paragraphs.",
}


@dataclass(frozen=True, slots=True)
class DraftedRun:
    """Rows that decoded together: their outputs, passes, seconds, and the tokens of their drafts."""

    outputs: tuple[tuple[int, ...], ...]
    passes: int
    seconds: float
    # Of all threads, on the processor.
    busy_s: float
    tokens: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per second, all rows together."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class DraftedWorkload:
    """Prompts that are answered together, and how."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    new_tokens: int
    is_steady: bool = False
    """Time ends when the first row has finished, so that all rows decode all the time."""


class SyntheticSources:
    """Guesses RIGHT with a given probability for each token of a row, and otherwise WRONG."""

    def __init__(self, acceptance: float, rows: RowSlots, _cache: PrefixCache) -> None:
        self._acceptance = acceptance
        self._rows = rows

    def guess(self, row: RowSlot, most: int) -> Guess:
        """Return `most` tokens for any row; the same ones as long as its length is the same."""
        numbers = random.Random(int(self._rows.handle[row]) << 32 | int(self._rows.length[row]))
        ids = [RIGHT if numbers.random() < self._acceptance else WRONG for _ in range(most)]
        return Guess(np.array(ids, np.int32), Origin.CACHE)


class DraftingServer:
    """A scheduler's core over an engine; each run begins with an empty cache."""

    def __init__(self, engine: ModelEngine, capacity: EngineCapacity, rows: int) -> None:
        """Use a configured engine for up to `rows` rows."""
        self._engine = engine
        self._capacity = capacity
        self._rows = rows
        self._next_step = 0

    def run(
        self,
        workload: DraftedWorkload,
        method: Method,
        make_sources: Callable[[RowSlots, PrefixCache], GuessesTokens] = DraftSources,
    ) -> DraftedRun:
        """Answer all prompts together; time counts once all rows decode."""
        self._engine.reset()
        speculation = SpeculationSettings(method=method)
        settings = SchedulerSettings(max_rows=self._rows, speculation=speculation)
        capacity = self._capacity
        allocator = make_allocator("isolated", capacity.device_pages, capacity.page_size, None)
        cache = make_cache("isolated", allocator, capacity.page_size)
        core = SchedulerCore(
            resolve_core(settings, capacity), allocator, cache, make_order(settings.queue), make_sources=make_sources
        )
        options = RequestOptions(workload.sampling, StopConditions(max_tokens=workload.new_tokens, ignore_eos=True))
        for number, prompt in enumerate(workload.prompts):
            request = ScheduleRequest(
                RequestId(f"request-{number}"),
                View(Subject("tenant", "user")),
                ReplyTo(SubscriberId("gateway"), None),
                np.array(prompt, np.int32),
                options,
            )
            assert core.submit(request, 0.0).rejected is None, "the prompt fits"
        return self._decode(core, len(workload.prompts), is_steady=workload.is_steady)

    def _decode(self, core: SchedulerCore, rows: int, *, is_steady: bool) -> DraftedRun:
        outputs: dict[int, list[int]] = {}
        finished = passes = tokens = 0
        started, busy = time.perf_counter(), time.process_time()
        is_decoding = False

        def execute(plan: StepPlan) -> None:
            self._engine.execute(plan, core.apply)

        while finished < (1 if is_steady else rows):
            in_flight = core.in_flight
            plan = core.plan(time.perf_counter(), 0) if in_flight < 2 else None
            if plan is not None:
                passes += plan.steps
                execute(plan)
            else:
                self._engine.settle(lambda: core.in_flight < in_flight)  # noqa: B023  (called before it changes)
            output = core.take_output()
            if output is None:
                continue
            for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
                outputs.setdefault(handle, []).append(token)
            tokens += len(output.token_ids)
            finished += len(output.finishes)
            if not is_decoding and len(outputs) == rows:
                # Time counts from here: all prompts are computed.
                is_decoding, passes, tokens = True, core.in_flight, 0
                started, busy = time.perf_counter(), time.process_time()
        seconds, busy_s = time.perf_counter() - started, time.process_time() - busy
        self._engine.settle(lambda: False)
        found = core.speculation
        texts = tuple(tuple(outputs[handle]) for handle in sorted(outputs))
        return DraftedRun(texts, passes, seconds, busy_s, tokens, found.drafted_tokens, found.accepted_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", help="directory with config.json, for dummy weights")
    parser.add_argument(
        "--workloads", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS), help="of the model"
    )
    parser.add_argument("--streams", type=int, nargs="*", default=STREAMS, help="of all workloads, together")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="of a shape, one after another")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.6, 0.9], help="of a draft's tokens")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of each prompt of a shape")
    parser.add_argument("--new-tokens", type=int, default=160, help="tokens of each answer")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    arguments = parser.parse_args(argv)
    deadline = Deadline.after(arguments.time_limit)
    if arguments.shape is None:
        measure_workloads(arguments, deadline, PartialResults("speculation", MODEL, arguments.json))
    else:
        model = f"{Path(arguments.shape).name} (dummy)"
        measure_shape(arguments, deadline, PartialResults("speculation", model, arguments.json))
    return 0


def start(spec: EngineSpec, device: str) -> tuple[ModelEngine, DraftingServer]:
    """Load a model."""
    engine = torch_engine(lambda its, report: load_decoder(its, report, RunnerOptions(device=device)))
    return engine, DraftingServer(engine, engine.configure(spec, lambda *_: None), spec.max_rows)


def measure_workloads(arguments: argparse.Namespace, deadline: Deadline, results: PartialResults) -> None:
    """Add tokens per pass and per second of the bundled model's answers, greedily."""
    rows = max((1, *arguments.streams))
    spec = EngineSpec(MODEL, max_rows=rows, max_context=1024, device_pages=64 * rows, max_step_tokens=512)
    engine, server = start(spec, arguments.device)
    text = load_text_model(resolve_model(MODEL)).tokenizer
    framed = {
        name: text.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").ids
        for name, prompt in WORKLOADS.items()
    }
    asked = {name: [framed[name]] for name in arguments.workloads}
    asked |= {f"{count} streams": list(islice(cycle(framed.values()), count)) for count in arguments.streams}
    for name in within_time([name for name in asked for _ in range(REPEATS)], deadline, RESERVE_S):
        workload = DraftedWorkload(asked[name], SamplingParams(temperature=0.0), arguments.new_tokens)
        without, drafted = server.run(workload, "off"), server.run(workload, "ngram")
        add_figures(results, name, without, drafted)
        results.add(f"{name}: equal outputs", "of 1", [float(without.outputs == drafted.outputs)])
    engine.close()


def measure_shape(arguments: argparse.Namespace, deadline: Deadline, results: PartialResults) -> None:
    """Add times between tokens by rows and acceptance; rounds of all rows take turns."""
    most, length = max(arguments.rows), arguments.prompt + arguments.new_tokens
    spec = EngineSpec(
        arguments.shape, load_format="dummy", max_rows=most, max_context=max(1024, length + 1), max_step_tokens=8192
    )
    began_at = time.perf_counter()
    engine, server = start(spec, arguments.device)
    report(f"the model is loaded after {time.perf_counter() - began_at:.1f} s")
    ids = np.random.default_rng(0).integers(0, 10_000, (most, arguments.prompt))
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(RIGHT,))
    warm = set()
    for rows in within_time(list(arguments.rows) * REPEATS, deadline, RESERVE_S):
        workload = DraftedWorkload(ids[:rows].tolist(), sampling, arguments.new_tokens, is_steady=True)
        if rows not in warm:
            warm.add(rows)
            server.run(workload, "off")
        without = server.run(workload, "off")
        for acceptance in arguments.acceptance:
            drafted = server.run(workload, "ngram", partial(SyntheticSources, acceptance))
            name = f"{rows} rows, acceptance {acceptance:g}"
            add_figures(results, name, without, drafted)
            for label, run in (("with drafts", drafted), ("without", without)):
                results.add(f"{name}, {label}: ITL", "ms", [1000 * rows / run.rate])
    engine.close()


def add_figures(results: PartialResults, name: str, without: DraftedRun, drafted: DraftedRun) -> None:
    """Add throughput with drafts and without, tokens per pass, and the share of drafts that was accepted."""
    results.add(f"{name}, without: throughput", "tokens/s", [without.rate])
    results.add(f"{name}, with drafts: throughput", "tokens/s", [drafted.rate])
    results.add(f"{name}: gain", "%", [100 * (drafted.rate / without.rate - 1)])
    # Other programs on the machine hardly change this.
    busy = without.busy_s / without.tokens / drafted.busy_s * drafted.tokens
    results.add(f"{name}: gain per processor time", "%", [100 * (busy - 1)])
    results.add(f"{name}: tokens per row and pass", "tokens", [drafted.tokens / len(drafted.outputs) / drafted.passes])
    results.add(f"{name}: accepted of drafted", "%", [100 * drafted.accepted / max(drafted.drafted, 1)])


if __name__ == "__main__":
    sys.exit(main())
