"""Whole runs with every sampling parameter, on the device and on the host: the same tokens and log probabilities.

Where there is a GPU, passes are captured, and none of them may wait.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec, StepPlan, StepResult
from common.types import SamplingParams, StepId
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.execution.synchronous_executor import SynchronousExecutor
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.table import SamplingTable
from tests.services.worker.engine.execution.asked import GRAMMAR, EveryThird, random_sampling
from tests.services.worker.engine.execution.markov import PAGE_SIZE, PAGES, VOCABULARY, MarkovRunner
from tests.services.worker.engine.scenario import RandomScheduler, chunk, open_row, tokens_by_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.types import TokenLogprob
    from services.worker.engine.plans.passes import ForwardPass

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.execution.decode_graphs import DecodeGraph
from services.worker.engine.execution.overlapped_executor import LaunchedOutput, OverlappedExecutor

ROWS = 6
CPU = torch.device("cpu")


@contextmanager
def nothing_waits(device: torch.device) -> Iterator[None]:
    """Let whatever waits for the device fail."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class StrictExecutor(OverlappedExecutor):
    """Launches without waiting, or not at all."""

    def launch(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> LaunchedOutput:
        with nothing_waits(self._runner.device):
            return super().launch(rows, forward, catch_up, report_ready)


def spec(**changes: object) -> EngineSpec:
    fields: dict[str, object] = {"max_rows": ROWS, "page_size": PAGE_SIZE, **changes}
    return EngineSpec("none", **fields)  # type: ignore[arg-type]  # whatever a test wants to change


LIMITS = PlanLimits(VOCABULARY, PAGES, 256)


@dataclass
class Heard:
    """What was told of each row while it was open, in order."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def take(self, results: list[StepResult]) -> None:
        for result in results:
            for row, token in tokens_by_row(result).items():
                self.tokens.setdefault(row, []).append(token)
            for slot, told in result.logprobs:
                self.logprobs.setdefault(slot, []).append(told)


class OnHost:
    """The reference."""

    def __init__(self) -> None:
        table = SamplingTable(ROWS, VOCABULARY)
        table.grammars = EveryThird(VOCABULARY)  # type: ignore[assignment]  # stands in for `RowMasks`
        self._plans = SynchronousRunner(
            RowStates(ROWS, 64, PAGE_SIZE), LIMITS, SynchronousExecutor(MarkovRunner(CPU), table, rank=0)
        )

    def run(self, plan: StepPlan) -> list[StepResult]:
        results: list[StepResult] = []
        self._plans.run(plan, results.append)
        return results


class OnDevice:
    """What is tested: as the engine makes it."""

    def __init__(self, device: torch.device, runner: MarkovRunner | None = None, **changes: object) -> None:
        executor = StrictExecutor(runner or MarkovRunner(device), spec(**changes))
        with torch.inference_mode():
            if device.type != "cpu":
                executor.capture(lambda _share: None)
        executor.use_grammars(EveryThird(VOCABULARY))  # type: ignore[arg-type]  # stands in for `RowMasks`
        self.plans = OverlappedRunner(RowStates(ROWS, 64, PAGE_SIZE), LIMITS, executor)

    def run(self, plan: StepPlan) -> list[StepResult]:
        results: list[StepResult] = []
        with torch.inference_mode():
            self.plans.run(plan, results.append)
            self.plans.settle(lambda: False)
        return results


@dataclass
class Asking(RandomScheduler):
    """Opens rows that ask for anything."""

    def plan(self) -> StepPlan:
        plan = super().plan()
        opens = tuple(
            replace(
                opened,
                sampling=random_sampling(self.random, VOCABULARY),
                stop_token_ids=tuple(self.random.sample(range(VOCABULARY), 20)),
                min_new_tokens=self.random.choice([0, 0, 4]),
            )
            for opened in plan.opens
        )
        return replace(plan, opens=opens)


class Seldom(Random):
    """Ids from this vocabulary, whatever the scenario thinks it is."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return super().randrange(min(start, VOCABULARY), stop, step)


def same(one: TokenLogprob, other: TokenLogprob) -> bool:
    return (
        one.top_token_ids == other.top_token_ids
        and one.logprob == pytest.approx(other.logprob, abs=1e-4)
        and one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
        and one.asked == pytest.approx(other.asked, abs=1e-4)
    )


def assert_same(got: Heard, expected: Heard) -> None:
    assert got.tokens == expected.tokens
    assert got.logprobs.keys() == expected.logprobs.keys()
    for row, told in expected.logprobs.items():
        assert len(got.logprobs[row]) == len(told)
        assert all(same(one, other) for one, other in zip(got.logprobs[row], told, strict=True))


@pytest.mark.parametrize("seed", range(10 if torch.cuda.is_available() else 2))
def test_random_plans_give_the_same_results_as_the_host(device: torch.device, seed: int) -> None:
    """Rows come and go in the middle of others', in chunks, and come back with what they had sampled."""
    scheduler = Asking(Seldom(seed), MarkovRunner(CPU).capacity, max_rows=ROWS)
    on_host, on_device = OnHost(), OnDevice(device)
    for _ in range(25 if torch.cuda.is_available() else 15):
        plan = scheduler.plan()
        wanted = on_host.run(plan)
        got, expected = Heard(), Heard()
        expected.take(wanted)
        got.take(on_device.run(plan))
        assert_same(got, expected)
        for result in wanted:
            scheduler.observe(result)
    assert scheduler.rows


# A few tokens that come again and again.
REPEATING = SamplingParams(
    temperature=0.0, frequency_penalty=1.5, allowed_token_ids=tuple(range(12)), top_logprobs=3, seed=1
)


def opened_rows(count: int, seed: int) -> StepPlan:
    """Return rows of different lengths, so that passes sort them, that ask for anything; the first ones repeat."""
    random = Random(seed)
    lengths = range(3, 3 + count)
    opens = tuple(
        open_row(row, [random.randrange(VOCABULARY) for _ in range(length)], range(10 * row, 10 * row + 10),
                 total=length + 25,
                 sampling=REPEATING if row < 2 else random_sampling(random, VOCABULARY, is_bound=False))
        for row, length in enumerate(lengths)
    )  # fmt: skip
    prefills = tuple(chunk(row, 0, length) for row, length in enumerate(lengths))
    return StepPlan(StepId(1), opens=opens, prefills=prefills, steps=25)


def test_the_next_pass_is_launched_before_the_last_token_is_known(device: torch.device) -> None:
    """All passes of a lease are launched before anything is known of the one before the last."""
    on_device, on_host = OnDevice(device), OnHost()
    known: list[int] = []
    plain = on_device.plans.rows.record

    def record(rows, positions, token_ids):  # type: ignore[no-untyped-def]  # as `RowStates.record`
        known.append(int(on_device.plans.rows.lengths[rows].max() - positions.max()))
        return plain(rows, positions, token_ids)

    on_device.plans.rows.record = record  # type: ignore[method-assign]
    plan = opened_rows(ROWS, 3)
    got, expected = Heard(), Heard()
    got.take(on_device.run(plan))
    expected.take(on_host.run(plan))
    assert_same(got, expected)
    # Each token but the last was told when the next one had been launched.
    assert known[:-1] == [2] * 24


def test_a_pass_is_computed_while_the_grammars_of_its_rows_are_followed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device, on_host = OnDevice(device), OnHost()
    computed, known = [0], []
    compute, record = DecodeGraph.compute, on_device.plans.rows.record

    def counted(graph: DecodeGraph) -> None:
        computed[0] += 1
        compute(graph)

    def noted(rows, positions, token_ids):  # type: ignore[no-untyped-def]  # as `RowStates.record`
        known.append(computed[0])
        return record(rows, positions, token_ids)

    monkeypatch.setattr(DecodeGraph, "compute", counted)
    on_device.plans.rows.record = noted  # type: ignore[method-assign]
    held = SamplingParams(temperature=0.7, seed=4, grammar=GRAMMAR)
    opens = tuple(open_row(row, [5, 6, 7], range(8 * row, 8 * row + 8), total=15, sampling=held) for row in range(3))
    plan = StepPlan(StepId(1), opens=opens, prefills=tuple(chunk(row, 0, 3) for row in range(3)), steps=12)
    got, expected = Heard(), Heard()
    got.take(on_device.run(plan))
    expected.take(on_host.run(plan))
    assert_same(got, expected)
    # The first pass is the prompts'. Each later one is computed before the tokens of the one before are known.
    assert known == [*range(1, 12), 11]


def test_ranks_that_receive_tokens_stay_in_step_with_the_sampling_rank(device: torch.device) -> None:
    """Rank 1 has no logits: it makes the same exchanges in the same order, whoever samples, and ends up the same."""
    if device.type != "cpu":
        pytest.skip("exchanges are recorded as they happen, not as they are captured")
    told: list[torch.Tensor] = []
    first = MarkovRunner(CPU, tells=told)
    ranks = (first, MarkovRunner(CPU, told=told))
    beyond = SamplingParams(temperature=0.8, seed=5, top_logprobs=21, frequency_penalty=0.5)
    plan = opened_rows(4, 8)
    late = StepPlan(
        StepId(2), opens=(open_row(5, [9, 8, 7], range(90, 98), total=12, sampling=beyond),),
        prefills=(chunk(5, 0, 3),), steps=14,
    )  # fmt: skip
    plans = (replace(plan, steps=4), late)
    expected, on_host = Heard(), OnHost()
    for each in plans:
        expected.take(on_host.run(each))
    heard, lengths = [], []
    for rank, runner in enumerate(ranks):
        worker = OnDevice(CPU, runner, rank=rank, world_size=2)
        taken = Heard()
        for each in plans:
            taken.take(worker.run(each))
        heard.append(taken)
        lengths.append(worker.plans.rows.lengths.tolist())
    assert not told
    assert_same(heard[0], expected)
    assert heard[1].tokens == expected.tokens
    assert not heard[1].logprobs
    assert lengths[0] == lengths[1]
