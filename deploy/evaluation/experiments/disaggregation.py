"""A simulation of many GPUs: groups with roles beside groups that do both, by workload.

Run as `python -m deploy.evaluation.experiments.disaggregation [--json FILE]`. A GPU is a group that serves the shape of
Llama-3.1-8B; the time of a pass is that of an H200, as `CostModel` says, and is checked first against what was measured
over HTTP. Requests arrive at random (Poisson) and go to the group with the least work. Each layout is given the highest
rate at which tokens come in time, and then all layouts the same rate.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import math
import shlex
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from common.types import GroupRole
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, current_commit, write_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BENCHMARK, MODEL = "disaggregation", "llama-3.1-8b"
GPUS = (64, 1024)
# The most that a layout serves is searched with so many.
SEARCHED_GPUS = 16
# Of one GPU: rows, and tokens of KV that fit beside the weights.
MAX_ROWS, KV_TOKENS = 256, 790_000
PREFILL_STEP = 8192
MIXED_STEPS = (512, 1024)
PREFILL_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
# Fewer missing tokens are computed where they are decoded (scheduler.prefill_min_tokens).
PREFILL_MIN_TOKENS = 512
# What a decoding row counts in the load of a group, in tokens.
ROW_LOAD = 64.0
# Limits within which a layout serves: time to the first token, and between tokens, for 99 of 100.
MOST_TTFT_S, MOST_ITL_S = 2.0, 0.05
SIMULATED_S, WARM_UP_S = 28.0, 12.0
# Processor time of a gateway for a streamed token, by `pando bench control-plane` (docs/benchmarks/services.md).
GATEWAY_TOKEN_S = 12.6e-6
# Layouts are compared at this share of the most that groups that do both serve.
COMMON_LOAD = 0.8


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times of one H200 with the 8B shape in bfloat16, as measured in `results/h200.json` and explained beside it."""

    # A decode step of one row, which reads the weights once.
    floor_s: float = 4.3e-3
    launch_s: float = 1.5e-3
    tokens_per_s: float = 43_000
    kv_token_bytes: int = 131_072
    kv_bytes_per_s: float = 4.2e12
    # What 8,192 tokens in a row take beyond that, by pairs of a token and a key before it.
    pair_s: float = 6.4e-10
    # Copies of pages between device and host, one after the other on both sides, as fast as they were measured.
    transfer_bytes_per_s: float = 25e9

    def pass_s(self, prompt_tokens: int, pairs: float, rows: int, kv_tokens: int) -> float:
        """Return the time of a pass of chunks and of decoding rows that read so many tokens of KV."""
        products = max(self.floor_s, self.launch_s + (prompt_tokens + rows) / self.tokens_per_s)
        return products + pairs * self.pair_s + kv_tokens * self.kv_token_bytes / self.kv_bytes_per_s

    def transfer_s(self, tokens: int) -> float:
        """Return the time in which the KV of a prompt arrives in another group."""
        return tokens * self.kv_token_bytes / self.transfer_bytes_per_s


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A prompt and the length of its answer.

    All groups have the first `shared` tokens in their caches, and the group that decodes it the `own` ones after them.
    """

    shared: int
    own: int
    missing: int
    output: int

    @property
    def prompt(self) -> int:
        """Tokens in all."""
        return self.shared + self.own + self.missing


def fixed(prompt: int, output: int) -> Callable[[Random], SimulatedRequest]:
    """Return requests that are all of the same length, and share nothing."""
    return lambda _random: SimulatedRequest(0, 0, prompt, output)


def chat(random: Random) -> SimulatedRequest:
    """Return a turn after a cached system prompt and history; one of ten brings a document."""
    turn = max(8, round(random.lognormvariate(math.log(120), 1.0)))
    history = round(random.expovariate(1 / 800))
    document = random.randint(4_000, 30_000) if random.random() < 0.1 else 0
    output = min(1200, max(8, round(random.lognormvariate(math.log(250), 0.7))))
    return SimulatedRequest(1_500, history, turn + document, output)


WORKLOADS: dict[str, Callable[[Random], SimulatedRequest]] = {
    "8,192 in, 256 out": fixed(8192, 256),
    "1,784 in, 256 out": fixed(1784, 256),
    "chat": chat,
}


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """Number of GPUs that only compute prompts, and the most tokens of a pass on the others."""

    gpus: int
    prefill: int
    step_tokens: int

    @property
    def name(self) -> str:
        """For people."""
        if not self.prefill:
            return f"both, steps of {self.step_tokens}"
        return f"{self.prefill / self.gpus:.1%} prefill".replace(".0%", "%")


@dataclass(slots=True)
class PromptInWork:
    """A prompt on its way; the KV of its first `done` tokens is there."""

    request: SimulatedRequest
    arrived: float
    done: int


@dataclass(slots=True)
class SimulatedGpu:
    """One group: the prompts in its queue and in its passes, and its decoding rows."""

    number: int
    role: GroupRole
    step_tokens: int
    queue: deque[PromptInWork] = field(default_factory=deque)
    chunked: deque[PromptInWork] = field(default_factory=deque)
    # Prompts whose KV has come from another group: a pass over their last token is left.
    fetched: deque[PromptInWork] = field(default_factory=deque)
    # Prompts that the pass under way completes.
    completing: list[PromptInWork] = field(default_factory=list)
    rows: int = 0
    kv_tokens: int = 0
    reserved_tokens: int = 0
    passes: int = 0
    # By the pass with which they end: the rows, their tokens by then, and the tokens that were reserved.
    ends: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    pending_tokens: int = 0
    is_busy: bool = False

    @property
    def load(self) -> float:
        """Tokens to be computed, and as many for each row as routers count."""
        return self.pending_tokens + ROW_LOAD * (self.rows + len(self.fetched))

    def enqueue(self, prompt: PromptInWork) -> None:
        """Add a prompt to be computed."""
        self.queue.append(prompt)
        self.pending_tokens += prompt.request.prompt - prompt.done

    def begin_pass(self, costs: CostModel) -> float | None:
        """Begin a pass and return its time; None: there is nothing to do."""
        while self.fetched and self._reserve(self.fetched[0]):
            self.completing.append(self.fetched.popleft())
        while self.queue and self._reserve(self.queue[0]):
            self.chunked.append(self.queue.popleft())
        budget, tokens, pairs = self.step_tokens - self.rows, len(self.completing), 0.0
        while self.chunked and budget > 0:
            prompt = self.chunked[0]
            chunk = min(budget, prompt.request.prompt - prompt.done)
            pairs += chunk * (prompt.done + chunk / 2)
            prompt.done += chunk
            tokens, budget = tokens + chunk, budget - chunk
            self.pending_tokens -= chunk
            if prompt.done == prompt.request.prompt:
                self.completing.append(self.chunked.popleft())
        if not tokens and not self.rows:
            return None
        self.is_busy = True
        return costs.pass_s(tokens, pairs, self.rows, self.kv_tokens)

    def end_pass(self) -> list[PromptInWork]:
        """End the pass; return the prompts that it completed, which decode here unless this group only computes."""
        self.is_busy = False
        self.passes += 1
        self.kv_tokens += self.rows
        rows, tokens, reserved = self.ends.pop(self.passes, (0, 0, 0))
        self.rows -= rows
        self.kv_tokens -= tokens
        self.reserved_tokens -= reserved
        completed, self.completing = self.completing, []
        if self.role is not GroupRole.PREFILL:
            for each in completed:
                self._decode(each.request)
        return completed

    def forget(self, prompt: PromptInWork) -> None:
        """Free the memory of a prompt that another group has read."""
        self.reserved_tokens -= prompt.request.prompt

    def _reserve(self, prompt: PromptInWork) -> bool:
        """Take memory and a row for a prompt, if there are any left."""
        needed = prompt.request.prompt + (0 if self.role is GroupRole.PREFILL else prompt.request.output)
        if self.rows + len(self.chunked) + len(self.completing) >= MAX_ROWS:
            return False
        if self.reserved_tokens + needed > KV_TOKENS:
            return False
        self.reserved_tokens += needed
        return True

    def _decode(self, request: SimulatedRequest) -> None:
        """Start a row, whose first token is there."""
        if request.output == 1:
            self.reserved_tokens -= request.prompt + 1
            return
        self.rows += 1
        self.kv_tokens += request.prompt
        end = self.ends[self.passes + request.output - 1]
        end[0] += 1
        end[1] += request.prompt + request.output - 1
        end[2] += request.prompt + request.output


class Latencies:
    """Counts of times on a logarithmic scale, 1 % apart; no list of a hundred million of them is kept."""

    def __init__(self) -> None:
        """Start without any."""
        self._counts: defaultdict[int, int] = defaultdict(int)

    def add(self, seconds: float, count: int = 1) -> None:
        """Add a time `count` times."""
        self._counts[round(math.log(max(seconds, 1e-6)) * 100)] += count

    def percentile(self, percent: float) -> float:
        """Return the time that `percent` % do not exceed, in seconds; 0 without any."""
        left = sum(self._counts.values()) * percent / 100
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return math.exp(place / 100)
        return 0.0


@dataclass(slots=True)
class FleetFigures:
    """The latencies that users of a layout see, and the load between its parts."""

    rate: float
    ttft: Latencies = field(default_factory=Latencies)
    itl: Latencies = field(default_factory=Latencies)
    tokens: int = 0
    moved_tokens: int = 0
    moved_prompts: int = 0
    unanswered: int = 0
    requests: int = 0

    @property
    def keeps_limits(self) -> bool:
        """Whether tokens come in time, and no queue grows without end."""
        in_time = self.ttft.percentile(99) <= MOST_TTFT_S and self.itl.percentile(99) <= MOST_ITL_S
        return in_time and self.unanswered <= 0.01 * self.requests


class FleetSimulation:
    """A layout under Poisson arrivals."""

    def __init__(self, layout: FleetLayout, costs: CostModel, seed: int = 0) -> None:
        """Start with idle groups."""
        self._costs = costs
        self._random = Random(seed)
        roles = [GroupRole.PREFILL] * layout.prefill
        roles += [GroupRole.DECODE if layout.prefill else GroupRole.BOTH] * (layout.gpus - layout.prefill)
        self._gpus = [
            SimulatedGpu(i, role, PREFILL_STEP if role is GroupRole.PREFILL else layout.step_tokens)
            for i, role in enumerate(roles)
        ]
        self._first_decoder = layout.prefill
        self._loads = np.zeros(layout.gpus)
        self._events: list[tuple[float, int, SimulatedGpu | None, PromptInWork | None]] = []
        self._planned = 0
        self._durations = [0.0] * layout.gpus

    def run(
        self, draw: Callable[[Random], SimulatedRequest], rate: float, seconds: float = SIMULATED_S
    ) -> FleetFigures:
        """Let requests arrive at `rate` per GPU and second; return what came after the warm-up."""
        figures = FleetFigures(rate)
        per_second = rate * len(self._gpus)
        self._plan(self._random.expovariate(per_second), None, None)
        now = 0.0
        while self._events:
            now, _, gpu, prompt = heapq.heappop(self._events)
            if now > seconds:
                break
            if gpu is None:
                self._plan(now + self._random.expovariate(per_second), None, None)
                self._arrive(now, draw(self._random), figures)
            elif prompt is not None:
                gpu.fetched.append(prompt)
                self._wake(gpu, now)
            else:
                self._end_pass(gpu, now, figures)
        waiting = [each for gpu in self._gpus for each in (*gpu.queue, *gpu.chunked, *gpu.fetched, *gpu.completing)]
        figures.unanswered = sum(each.arrived < seconds - MOST_TTFT_S for each in waiting)
        return figures

    def _plan(self, at: float, gpu: SimulatedGpu | None, prompt: PromptInWork | None) -> None:
        self._planned += 1
        heapq.heappush(self._events, (at, self._planned, gpu, prompt))

    def _arrive(self, now: float, request: SimulatedRequest, figures: FleetFigures) -> None:
        figures.requests += now >= WARM_UP_S
        is_remote = self._first_decoder > 0 and request.missing >= PREFILL_MIN_TOKENS
        done = request.shared + (0 if is_remote else request.own)
        groups = slice(0, self._first_decoder) if is_remote else slice(self._first_decoder, None)
        gpu = self._gpus[(groups.start or 0) + int(self._loads[groups].argmin())]
        gpu.enqueue(PromptInWork(request, now, done))
        self._wake(gpu, now)

    def _wake(self, gpu: SimulatedGpu, now: float) -> None:
        if not gpu.is_busy:
            took = gpu.begin_pass(self._costs)
            if took is not None:
                self._durations[gpu.number] = took
                self._plan(now + took, gpu, None)
        self._loads[gpu.number] = gpu.load

    def _end_pass(self, gpu: SimulatedGpu, now: float, figures: FleetFigures) -> None:
        is_counted = now >= WARM_UP_S
        if gpu.rows and is_counted:
            figures.itl.add(self._durations[gpu.number], gpu.rows)
            figures.tokens += gpu.rows
        for prompt in gpu.end_pass():
            if gpu.role is GroupRole.PREFILL:
                gpu.forget(prompt)
                self._send(prompt, now, figures if is_counted else FleetFigures(0.0))
            elif is_counted:
                figures.ttft.add(now - prompt.arrived)
                figures.tokens += 1
        self._wake(gpu, now)

    def _send(self, prompt: PromptInWork, now: float, figures: FleetFigures) -> None:
        """Move the KV of a prompt to the decode group with the least load."""
        target = self._gpus[self._first_decoder + int(self._loads[self._first_decoder :].argmin())]
        figures.moved_tokens += prompt.request.prompt
        figures.moved_prompts += 1
        self._plan(now + self._costs.transfer_s(prompt.request.prompt), target, prompt)
        # Others that are sent meanwhile go elsewhere.
        self._loads[target.number] += ROW_LOAD


def layouts(gpus: int) -> list[FleetLayout]:
    """Return groups that do both, by the size of their steps, then those with roles."""
    mixed = [FleetLayout(gpus, 0, step) for step in MIXED_STEPS]
    return mixed + [FleetLayout(gpus, round(gpus * share), PREFILL_STEP // 16) for share in PREFILL_SHARES]


def most_within_limits(layout: FleetLayout, draw: Callable[[Random], SimulatedRequest], costs: CostModel) -> float:
    """Return the highest rate per GPU, in requests per second to 6 %, that the layout serves in time; 0: none."""
    low, high = 0.0, 1.0
    while high <= 64 and FleetSimulation(layout, costs).run(draw, high).keeps_limits:
        low, high = high, 2 * high
    while high - low > 0.06 * high and high > 0.05:
        middle = (low + high) / 2
        if FleetSimulation(layout, costs).run(draw, middle).keeps_limits:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class RoleFigure:
    """One value of the table; `label` is the size of the fleet."""

    label: str
    metric: str
    value: float
    unit: str


def check_model(costs: CostModel) -> Iterator[RoleFigure]:
    """Yield what the simulation says about the load of which `results/h200.json` has the measurement."""
    for rate in (8.0, 16.0):
        figures = FleetSimulation(FleetLayout(1, 0, 3584), costs).run(fixed(1784, 256), rate, seconds=68.0)
        yield from _latencies("1 GPU", f"1,784 in at {rate:g}/s", figures)


def _latencies(label: str, name: str, figures: FleetFigures) -> Iterator[RoleFigure]:
    for kind, times in (("TTFT", figures.ttft), ("ITL", figures.itl)):
        for percent in (50, 99):
            yield RoleFigure(label, f"{name}: {kind} p{percent}", 1e3 * times.percentile(percent), "ms")


def compare(workload: str, sizes: Sequence[int], costs: CostModel) -> Iterator[RoleFigure]:
    """Yield the most that each layout of few GPUs serves, and latencies of the best ones in all fleets."""
    draw = WORKLOADS[workload]
    most = {layout: most_within_limits(layout, draw, costs) for layout in layouts(SEARCHED_GPUS)}
    for layout, rate in most.items():
        yield RoleFigure(f"{SEARCHED_GPUS} GPUs", f"{workload}: {layout.name}: most", rate, "requests/s/GPU")
    mixed = max((each for each in most if not each.prefill), key=lambda each: most[each])
    divided = max((each for each in most if each.prefill), key=lambda each: most[each])
    common = COMMON_LOAD * most[mixed]
    for size in sizes:
        for kind, best in (("both", mixed), ("roles", divided)):
            layout = FleetLayout(size, best.prefill * size // SEARCHED_GPUS, best.step_tokens)
            figures = FleetSimulation(layout, costs).run(draw, common)
            name = f"{workload} at {common:.3g}/s: {kind}"
            yield from _latencies(f"{size} GPUs", name, figures)
            if kind == "roles":
                yield from _exchanged(f"{size} GPUs", name, figures, costs)
            else:
                yield from _control_plane(f"{size} GPUs", name, size, figures)


def _exchanged(label: str, name: str, figures: FleetFigures, costs: CostModel) -> Iterator[RoleFigure]:
    seconds = SIMULATED_S - WARM_UP_S
    yield RoleFigure(label, f"{name}: prompts moved", figures.moved_prompts / seconds, "prompts/s")
    moved = figures.moved_tokens * costs.kv_token_bytes / seconds
    yield RoleFigure(label, f"{name}: pages moved", moved / 1e9, "GB/s")


def _control_plane(label: str, name: str, gpus: int, figures: FleetFigures) -> Iterator[RoleFigure]:
    """Yield the cores that services take for what the fleet serves, from what they were measured to take."""
    seconds = SIMULATED_S - WARM_UP_S
    tokens, requests = figures.tokens / seconds, figures.requests / seconds
    yield RoleFigure(label, f"{name}: output", tokens, "tok/s")
    folder = Path(__file__).parents[1] / "results"
    scale = {entry["metric"]: entry["value"] for entry in json.loads((folder / "control_plane_scale.json").read_text())}
    known = [1, 64, 256, 1000]
    by_groups = [scale[f"{groups} groups, idle: per request"] for groups in known]
    yield RoleFigure(label, f"{name}: gateways", tokens * GATEWAY_TOKEN_S, "cores")
    yield RoleFigure(label, f"{name}: detokenizers", tokens * scale["125 schedulers: per token"] * 1e-6, "cores")
    cost = float(np.interp(gpus, known, by_groups)) * 1e-6
    yield RoleFigure(label, f"{name}: tokenizers", requests * cost, "cores")


def main() -> None:
    """Simulate and print; with `--json` also keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS))
    parser.add_argument("--transfer-gb-s", type=float, help="GB/s at which pages move from one GPU to another")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    costs = CostModel()
    if arguments.transfer_gb_s:
        costs = CostModel(transfer_bytes_per_s=arguments.transfer_gb_s * 1e9)
    figures = list(check_model(costs))
    for workload in arguments.workloads:
        figures += compare(workload, sorted(arguments.gpus), costs)
    table = Table("fleet", "figure", "value", "unit")
    for figure in figures:
        table.add_row(figure.label, figure.metric, f"{figure.value:.4g}", figure.unit)
    output_console().print(table)
    if arguments.json:
        keep(figures, arguments.json)


def keep(figures: Sequence[RoleFigure], path: Path) -> None:
    """Write the figures to a file of results."""
    command = shlex.join(["python", "-m", f"deploy.evaluation.experiments.{BENCHMARK}", *sys.argv[1:]])
    origin = Provenance(command, current_commit(), datetime.datetime.now(datetime.UTC).date().isoformat())
    for label in dict.fromkeys(figure.label for figure in figures):
        sheet = ResultSheet(BENCHMARK, MODEL, 1, origin, label)
        for figure in figures:
            if figure.label == label:
                sheet.add(figure.metric, figure.value, figure.unit)
        write_results(path, sheet.results)


if __name__ == "__main__":
    main()
