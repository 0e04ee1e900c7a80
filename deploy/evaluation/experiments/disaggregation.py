"""A simulation of many GPUs: groups with roles beside groups that do both, by workload.

Run as `python -m deploy.evaluation.experiments.disaggregation [--json FILE]`. A GPU is a group that serves the shape of
Llama-3.1-8B; times are those of an H200, as `CostModel` says. Loads that one and two GPUs were measured with are
simulated first. Requests arrive at random (Poisson) and go to the group with the fewest open ones. Each layout is given
the highest rate at which tokens come in time, and then the best layouts the same rate.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import math
import shlex
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from common.types import GroupRole
from deploy.evaluation.bench.arrivals import gamma_arrivals
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, current_commit, read_results, write_results
from deploy.evaluation.experiments.gpu_table import GROUP_LAYOUTS, ONLINE_RATES
from deploy.evaluation.experiments.h200_costs import CostModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BENCHMARK, MODEL = "disaggregation", "llama-3.1-8b"
RESULTS = Path(__file__).parents[1] / "results"
GPUS = (64, 1024)
# The most that a layout serves is searched with so many.
SEARCHED_GPUS = 16
# Of one GPU: rows, and tokens of KV that fit beside the weights.
MAX_ROWS, KV_TOKENS = 256, 790_000
# Of the setting that was measured on two GPUs (`gpu_table prefill-and-decode-small-steps`).
PREFILL_STEP = 2048
MIXED_STEPS = (512, 1024)
DECODE_STEP = 512
# Fewer missing tokens are computed where they are decoded: as in a group that has not measured yet from which number on
# leaving them to another one pays, or as scheduler.prefill_min_tokens says.
PREFILL_MIN_TOKENS = 512
# Limits within which a layout serves: time to the first token, and between tokens, for 99 of 100.
MOST_TTFT_S, MOST_ITL_S = 2.0, 0.05
SIMULATED_S, WARM_UP_S = 28.0, 12.0
# A search for the most that a layout serves begins with steps by this factor.
WIDEN = 1.3
# Layouts are compared at this share of the most that the one serves that serves less.
COMMON_LOAD = 0.8


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
    # When the group in which it is now got it.
    came: float


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
    mixed_passes: int = 0
    # When the next pass was planned: at the beginning of the latest one.
    planned_at: float = -math.inf
    # By the pass with which they end: the rows, their tokens by then, and the tokens that were reserved.
    ends: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    # Prompts whose KV is on its way from another group.
    coming: int = 0
    is_busy: bool = False

    @property
    def load(self) -> int:
        """Open requests, by which routers choose."""
        waiting = len(self.queue) + len(self.chunked) + len(self.completing) + len(self.fetched)
        return self.coming + waiting + self.rows

    def fetch(self, prompt: PromptInWork, now: float) -> None:
        """Take a prompt whose KV has arrived, and which was on its way here."""
        self.coming -= 1
        prompt.came = now
        self.fetched.append(prompt)

    def begin_pass(self, costs: CostModel, now: float) -> float | None:
        """Begin a pass and return its time; None: there is nothing to do.

        A pass is planned when the one before it begins, so that prompts that come meanwhile are in the one after.
        """
        self._admit(self.planned_at)
        if not (self.rows or self.chunked or self.completing):
            self._admit(now)
        self.planned_at = now
        started = len(self.completing)
        tokens, pairs = self._add_chunks()
        tokens += started
        if not tokens and not self.rows:
            return None
        self.is_busy = True
        took = costs.pass_s(tokens, pairs, self.rows, self.kv_tokens) + costs.start_s * bool(started)
        if self.role is GroupRole.BOTH and self.rows and pairs and costs.mixed_passes_per_slow_one:
            self.mixed_passes += 1
            took *= 1 + (self.mixed_passes % costs.mixed_passes_per_slow_one == 0)
        return took

    def _admit(self, until: float) -> None:
        """Take prompts that have come by then into the pass, as far as there is memory."""
        while self.fetched and self.fetched[0].came <= until and self._reserve(self.fetched[0]):
            self.completing.append(self.fetched.popleft())
        while self.queue and self.queue[0].came <= until and self._reserve(self.queue[0]):
            self.chunked.append(self.queue.popleft())

    def _add_chunks(self) -> tuple[int, float]:
        """Add chunks of prompts to the pass; return their tokens, and pairs of one and a token before it."""
        budget, tokens, pairs = self.step_tokens - self.rows, 0, 0.0
        while self.chunked and budget > 0:
            prompt = self.chunked[0]
            chunk = min(budget, prompt.request.prompt - prompt.done)
            pairs += chunk * (prompt.done + chunk / 2)
            prompt.done += chunk
            tokens, budget = tokens + chunk, budget - chunk
            if prompt.done == prompt.request.prompt:
                self.completing.append(self.chunked.popleft())
        return tokens, pairs

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
        self._counted_from = 0.0
        self._durations = [0.0] * layout.gpus

    def run(
        self, draw: Callable[[Random], SimulatedRequest], rate: float, seconds: float = SIMULATED_S
    ) -> FleetFigures:
        """Let requests arrive at `rate` per GPU and second; return what came after the warm-up."""
        self._counted_from = WARM_UP_S
        figures = self._serve(draw, self._poisson(rate * len(self._gpus)), rate, seconds)
        waiting = [each for gpu in self._gpus for each in (*gpu.queue, *gpu.chunked, *gpu.fetched, *gpu.completing)]
        figures.unanswered = sum(each.arrived < seconds - MOST_TTFT_S for each in waiting)
        return figures

    def replay(self, draw: Callable[[Random], SimulatedRequest], arrivals: Sequence[float]) -> FleetFigures:
        """Let requests arrive at these times, and return the figures of all of them."""
        return self._serve(draw, iter(arrivals), len(arrivals) / arrivals[-1] / len(self._gpus), math.inf)

    def _serve(
        self, draw: Callable[[Random], SimulatedRequest], arrivals: Iterator[float], rate: float, seconds: float
    ) -> FleetFigures:
        figures = FleetFigures(rate)
        self._plan(next(arrivals), None, None)
        while self._events:
            now, _, gpu, prompt = heapq.heappop(self._events)
            if now > seconds:
                break
            if gpu is None:
                following = next(arrivals, None)
                if following is not None:
                    self._plan(following, None, None)
                self._arrive(now, draw(self._random), figures)
            elif prompt is not None:
                gpu.fetch(prompt, now)
                self._wake(gpu, now)
            else:
                self._end_pass(gpu, now, figures)
        return figures

    def _poisson(self, per_second: float) -> Iterator[float]:
        now = 0.0
        while True:
            now += self._random.expovariate(per_second)
            yield now

    def _plan(self, at: float, gpu: SimulatedGpu | None, prompt: PromptInWork | None) -> None:
        self._planned += 1
        heapq.heappush(self._events, (at, self._planned, gpu, prompt))

    def _arrive(self, now: float, request: SimulatedRequest, figures: FleetFigures) -> None:
        figures.requests += now >= self._counted_from
        is_remote = self._first_decoder > 0 and request.missing >= PREFILL_MIN_TOKENS
        done = request.shared + (0 if is_remote else request.own)
        groups = slice(0, self._first_decoder) if is_remote else slice(self._first_decoder, None)
        gpu = self._gpus[(groups.start or 0) + int(self._loads[groups].argmin())]
        gpu.queue.append(PromptInWork(request, now, done, now))
        self._wake(gpu, now)

    def _wake(self, gpu: SimulatedGpu, now: float) -> None:
        if not gpu.is_busy:
            took = gpu.begin_pass(self._costs, now)
            if took is not None:
                self._durations[gpu.number] = took
                self._plan(now + took, gpu, None)
        self._loads[gpu.number] = gpu.load

    def _end_pass(self, gpu: SimulatedGpu, now: float, figures: FleetFigures) -> None:
        is_counted = now >= self._counted_from
        if gpu.rows and is_counted:
            figures.itl.add(self._durations[gpu.number], gpu.rows)
            figures.tokens += gpu.rows
        for prompt in gpu.end_pass():
            if gpu.role is GroupRole.PREFILL:
                gpu.forget(prompt)
                self._send(prompt, now, figures if is_counted else FleetFigures(0.0))
            elif is_counted:
                figures.ttft.add(now - prompt.arrived + self._costs.service_s)
                figures.tokens += 1
        self._wake(gpu, now)

    def _send(self, prompt: PromptInWork, now: float, figures: FleetFigures) -> None:
        """Move the KV of a prompt to the decode group with the least load."""
        target = self._gpus[self._first_decoder + int(self._loads[self._first_decoder :].argmin())]
        figures.moved_tokens += prompt.request.prompt
        figures.moved_prompts += 1
        self._plan(now + self._costs.transfer_s(prompt.request.prompt, PREFILL_STEP), target, prompt)
        target.coming += 1
        self._loads[target.number] = target.load


def mixed_layouts(gpus: int) -> list[FleetLayout]:
    """Return groups that do both, by the size of their steps."""
    return [FleetLayout(gpus, 0, step) for step in MIXED_STEPS]


def divided_layouts(gpus: int, around: float | None = None) -> list[FleetLayout]:
    """Return groups with roles by eighths, or by sixteenths up to an eighth beside the share `around` of prefill."""
    shares = [i / 8 for i in range(1, 8)] if around is None else [around + i / 16 for i in range(-2, 3)]
    return [FleetLayout(gpus, round(gpus * share), DECODE_STEP) for share in shares if 0 < share < 1]


def most_within_limits(
    layout: FleetLayout, draw: Callable[[Random], SimulatedRequest], costs: CostModel, expected: float = 1.0
) -> float:
    """Return the highest rate per GPU, in requests per second to 6 %, that the layout serves in time; 0: none."""

    def keeps(rate: float) -> bool:
        return FleetSimulation(layout, costs).run(draw, rate).keeps_limits

    low, high = 0.0, expected
    while high <= 64 and keeps(high):
        low, high = high, high * WIDEN
    while not low and high > 0.05:
        if keeps(high / WIDEN):
            low = high / WIDEN
        else:
            high /= WIDEN
    while high - low > 0.06 * high and low:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class RoleFigure:
    """One value of the table; `label` is the size of the fleet."""

    label: str
    metric: str
    value: float
    unit: str


def check_model(costs: CostModel) -> Iterator[RoleFigure]:
    """Yield what the simulation says of the loads that were measured, with the same arrivals.

    Those of one GPU are in `results/h200.json`, those of two in `group_roles.json`, labelled with the layout.
    """
    one = replace(costs, mixed_passes_per_slow_one=0)
    for online in ONLINE_RATES:
        arrivals = gamma_arrivals(60 * online, online, seed=online)
        figures = FleetSimulation(FleetLayout(1, 0, 3584), one).replay(fixed(1784, 256), arrivals)
        yield from _latencies("1 GPU", f"1,784 in at {online}/s", figures)
    for measured in GROUP_LAYOUTS[2:]:
        has_roles = "prefill" in measured.roles
        layout = FleetLayout(2, int(has_roles), PREFILL_STEP if has_roles else 1024)
        for seed, (tokens, rate, requests) in enumerate(measured.loads, 1):
            figures = FleetSimulation(layout, costs).replay(
                fixed(tokens, 256), gamma_arrivals(requests, rate, seed=seed)
            )
            yield from _latencies("2 GPUs", f"{measured.name}, {tokens:,} in, {rate} requests/s", figures)


def _latencies(label: str, name: str, figures: FleetFigures) -> Iterator[RoleFigure]:
    for kind, times in (("TTFT", figures.ttft), ("ITL", figures.itl)):
        for percent in (50, 99):
            yield RoleFigure(label, f"{name}: {kind} p{percent}", 1e3 * times.percentile(percent), "ms")


def compare(workload: str, sizes: Sequence[int], costs: CostModel) -> Iterator[RoleFigure]:
    """Yield the most that each layout serves in fleets of each size, and latencies of the best ones.

    Few GPUs are simulated with all ratios; each larger fleet with those near the best ratio of the next smaller one.
    """
    draw = WORKLOADS[workload]
    most: dict[FleetLayout, float] = {}
    best: dict[bool, FleetLayout] = {}
    for size in (SEARCHED_GPUS, *sizes):
        expected = {kind: most[layout] for kind, layout in best.items()}
        around = best[True].prefill / best[True].gpus if best else None
        most = {
            layout: most_within_limits(layout, draw, costs, expected.get(layout.prefill > 0, 1.0))
            for layout in (*mixed_layouts(size), *divided_layouts(size, around))
        }
        for layout, rate in most.items():
            yield RoleFigure(f"{size} GPUs", f"{workload}: {layout.name}: most", rate, "requests/s/GPU")
        best = {
            kind: max((each for each in most if bool(each.prefill) is kind), key=lambda each: most[each])
            for kind in (False, True)
        }
        common = COMMON_LOAD * min(most[each] for each in best.values())
        for kind, layout in best.items():
            figures = FleetSimulation(layout, costs).run(draw, common)
            name = f"{workload} at {common:.3g}/s: {layout.name}"
            yield from _latencies(f"{size} GPUs", name, figures)
            yield RoleFigure(f"{size} GPUs", f"{name}: within limits", float(figures.keeps_limits), "yes or no")
            if kind:
                yield from _exchanged(f"{size} GPUs", name, figures, costs)
            else:
                yield from control_plane(f"{size} GPUs", f"{workload} at {common:.3g}/s", size, figures)


def _exchanged(label: str, name: str, figures: FleetFigures, costs: CostModel) -> Iterator[RoleFigure]:
    seconds = SIMULATED_S - WARM_UP_S
    yield RoleFigure(label, f"{name}: prompts moved", figures.moved_prompts / seconds, "prompts/s")
    moved = figures.moved_tokens * costs.kv_token_bytes / seconds
    yield RoleFigure(label, f"{name}: pages moved", moved / 1e9, "GB/s")


def control_plane(label: str, name: str, gpus: int, figures: FleetFigures) -> Iterator[RoleFigure]:
    """Yield the cores that services take for what the fleet serves, from what they were measured to take.

    A gateway's time for a streamed token is that of one with 1,024 clients over HTTP (`control_plane_cell.json`).
    """
    seconds = SIMULATED_S - WARM_UP_S
    tokens, requests = figures.tokens / seconds, figures.requests / seconds
    yield RoleFigure(label, f"{name}: output", tokens, "tok/s")
    scale = {each.metric: each.value for each in read_results(RESULTS / "control_plane_scale.json")}
    known = [1, 64, 256, 1000]
    by_groups = [scale[f"{groups} groups, idle: per request"] for groups in known]
    yield RoleFigure(label, f"{name}: gateways", tokens * gateway_token_s(), "cores")
    yield RoleFigure(label, f"{name}: detokenizers", tokens * scale["125 schedulers: per token"] * 1e-6, "cores")
    cost = float(np.interp(gpus, known, by_groups)) * 1e-6
    yield RoleFigure(label, f"{name}: tokenizers", requests * cost, "cores")


def gateway_token_s() -> float:
    """Return the processor time of a gateway for a token streamed over HTTP, the mean of what was measured."""
    cell = read_results(RESULTS / "control_plane_cell.json")
    return 1e-6 * fmean(each.value for each in cell if each.metric == "gateway: per token")


def main() -> None:
    """Simulate and print; with `--json` also keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS))
    parser.add_argument("--transfer-gb-s", type=float, help="GB/s at which pages move from one GPU to another")
    parser.add_argument("--no-check", action="store_true", help="leave out the loads that were measured")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    costs = CostModel()
    if arguments.transfer_gb_s:
        costs = CostModel(transfer_bytes_per_s=arguments.transfer_gb_s * 1e9)
    figures = [] if arguments.no_check else list(check_model(costs))
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
