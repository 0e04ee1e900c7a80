"""Plans of the real scheduler, run ahead: tokens, ends and memory are as if every pass had been waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.steps import EngineSpec, StepPlan
from common.types import Finish, FinishReason, Pooling, RequestId, RowSlot, StepId
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.measuring.warm_up import warm_up
from tests.examples import examples
from tests.fakes.model_runner import CheckingRunner
from tests.fakes.simulated_worker import VOCABULARY, expected_output, next_token
from tests.services.scheduler.core.harness import STOP_ID, make_request
from tests.services.worker.engine.overlapped_worker import Arriving, LateExecutor, OverlappedHarness, OverlappedWorker
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import StepResult
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowStates

PROMPT = [11, 12, 13, 14, 15]


def lives(harness: OverlappedHarness, data: st.DataObject) -> None:
    """Submit, abort and lose workers at random; check every answer."""
    wanted: dict[str, tuple[list[int], int]] = {}
    embedded: dict[str, tuple[list[int], Pooling]] = {}
    aborted = set()
    for number in range(data.draw(st.integers(1, 12))):
        prompt = [(13 * i + data.draw(st.integers(0, 1))) % 900 + 10 for i in range(data.draw(st.integers(1, 25)))]
        name, tokens = f"r{number}", data.draw(st.integers(1, 25))
        pooling = data.draw(st.sampled_from([None, None, Pooling.LAST, Pooling.MEAN]))
        assert harness.core.submit(make_request(name, prompt, max_tokens=tokens, pooling=pooling), 0.0).rejected is None
        if pooling is None:
            wanted[name] = (prompt, tokens)
        else:
            embedded[name] = (prompt, pooling)
        for _ in range(data.draw(st.integers(0, 8))):
            harness.plan()
            harness.result()
        if data.draw(st.integers(0, 6)) == 0:
            name = data.draw(st.sampled_from(sorted(wanted | embedded)))
            if harness.core.abort(RequestId(name)):
                aborted.add(name)
        if data.draw(st.integers(0, 15)) == 0:
            harness.lose_workers()
    harness.run()
    for name, (prompt, tokens) in wanted.items():
        if name not in aborted:
            assert harness.finishes[name, 0].reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + tokens, (STOP_ID,))
    for name in embedded.keys() - aborted:
        assert_embedded(harness.finishes[name, 0], *embedded[name])


def assert_embedded(finish: Finish, prompt: list[int], pooling: Pooling) -> None:
    """The checking runner's hidden state is one-hot: the token that it would generate."""
    assert finish.embedding is not None
    hidden = np.zeros(VOCABULARY, np.float32)
    for end in range(1 if pooling is Pooling.MEAN else len(prompt), len(prompt) + 1):
        hidden[next_token(prompt[:end])] += 1
    np.testing.assert_allclose(np.frombuffer(finish.embedding, "<f4"), hidden / hidden.sum(), atol=1e-6)


@examples(30)
@given(st.data(), st.integers(14, 40), st.integers(1, 3), st.sampled_from([0.0, 0.004]))
def test_random_schedules_give_the_right_tokens(
    data: st.DataObject, pages: int, depth: int, target_plan_s: float
) -> None:
    lives(OverlappedHarness(LateExecutor, pages=pages, depth=depth, target_plan_s=target_plan_s), data)


@examples(20)
@given(st.data(), st.integers(14, 40), st.integers(1, 3), st.integers(1, 24), st.integers(2, 12))
def test_rows_with_two_page_tables_read_the_right_pages_in_both(
    data: st.DataObject, pages: int, depth: int, window: int, spare: int
) -> None:
    pool = (window + 4) // 4 + 2 + spare
    harness = OverlappedHarness(
        LateExecutor, pages=pages, depth=depth, target_plan_s=0.004, window=window, window_pool=pool
    )
    lives(harness, data)


@examples(20)
@given(
    st.data(), st.integers(14, 40), st.integers(1, 3), st.integers(2, 12), st.integers(1, 5),
    st.sampled_from([0.0, 0.004]),
)  # fmt: skip
def test_rows_with_recurrent_states_continue_from_the_right_ones(
    data: st.DataObject, pages: int, depth: int, snapshots: int, interval: int, target_plan_s: float
) -> None:
    harness = OverlappedHarness(
        LateExecutor, pages=pages, depth=depth, target_plan_s=target_plan_s, snapshots=snapshots, interval=interval
    )
    lives(harness, data)
    pool = harness.core.memory.cache.snapshots
    assert pool is not None
    assert pool.faults() == []


def worker() -> OverlappedWorker:
    return OverlappedWorker(64, 4, 8, LateExecutor(CheckingRunner()))


def steps(results: list[StepResult]) -> list[dict[int, int]]:
    return [tokens_by_row(result) for result in results]


def test_the_last_pass_is_delivered_with_the_next_plan_or_when_settling() -> None:
    one = worker()
    plan = StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1, 2, 3]),), prefills=(chunk(0, 0, 5),), steps=3)
    assert len(one.run(plan)) == 2
    (late,) = one.run(StepPlan(StepId(2)))
    assert (late.step_id, late.substep, late.last) == (1, 2, True)
    assert [result.step_id for result in one.settle()] == [2]
    assert one.runner.is_settled


@dataclass
class SlowExecutor(LateExecutor):
    """Passes end while the next one is launched, after `looks` looks at them."""

    looks: int = 0
    meanwhile: list[list[StepResult]] = field(default_factory=list)
    emitted: deque[StepResult] = field(default_factory=deque)

    def launch(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> Arriving:
        before = len(self.emitted)
        for _ in range(self.looks):
            report_ready()
        self.meanwhile.append(list(self.emitted)[before:])
        launched = super().launch(rows, forward, catch_up, lambda: None)
        return replace(launched, asks=1)


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_pass_that_ends_while_the_next_one_is_launched_is_reported_meanwhile(looks: int) -> None:
    executor = SlowExecutor(CheckingRunner(), looks=looks)
    one = OverlappedWorker(64, 4, 8, executor)
    executor.emitted = one.emitted
    tokens = expected_output(PROMPT, 8)
    one.run(StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1, 2]),), prefills=(chunk(0, 0, 5),)))
    one.run(StepPlan(StepId(2)))
    one.settle()
    first, second = executor.meanwhile
    assert first == []
    # It is not there at the first look.
    assert [(result.step_id, tokens_by_row(result)) for result in second] == [(1, {0: tokens[0]})] * (looks > 1)


def test_what_fails_while_a_result_is_reported_amid_a_launch_is_no_failure_of_the_launch() -> None:
    """Memory that lacks then must not make the pass be computed again in parts, and the result be lost silently."""
    executor = SlowExecutor(CheckingRunner(), looks=2)
    one = OverlappedWorker(64, 4, 8, executor)
    one.run(StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1, 2]),), prefills=(chunk(0, 0, 5),)))

    def lack(_result: StepResult) -> None:
        raise MemoryError("of the result")

    with pytest.raises(MemoryError, match="of the result"):
        one.runner.run(StepPlan(StepId(2)), lack)
    assert executor.launches == 2, "the pass was launched as a whole"
    one.runner.reset()
    again = StepPlan(StepId(3), opens=(open_row(0, PROMPT, [0, 1, 2]),), prefills=(chunk(0, 0, 5),))
    assert steps(one.run(again) + one.settle()) == [{0: expected_output(PROMPT, 8)[0]}]


def test_transfers_of_a_pass_without_rows_are_not_waited_for_amid_a_launch() -> None:
    executor = SlowExecutor(CheckingRunner(), looks=2)
    one = OverlappedWorker(64, 4, 8, executor)
    executor.emitted = one.emitted
    one.runner.run(StepPlan(StepId(1)), one.emitted.append)
    plan = StepPlan(StepId(2), opens=(open_row(0, PROMPT, [0, 1, 2]),), prefills=(chunk(0, 0, 5),))
    assert [result.step_id for result in one.run(plan)] == [1]
    assert executor.meanwhile == [[]]


def test_settling_stops_when_a_plan_is_waiting() -> None:
    one = worker()
    one.run(StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1, 2]),), prefills=(chunk(0, 0, 5),)))
    one.runner.settle(lambda: True, pause=lambda _seconds: None)
    assert not one.runner.is_settled


def test_a_row_that_stops_takes_part_once_more_and_its_token_is_dropped() -> None:
    tokens = expected_output(PROMPT, 20)
    executor = LateExecutor(CheckingRunner())
    one = OverlappedWorker(64, 4, 8, executor)
    opened = open_row(0, PROMPT, [0, 1, 2, 3, 4], total=20, stop=(tokens[2],))
    results = one.run(StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, 5),), steps=9)) + one.settle()
    assert steps(results) == [{0: tokens[0]}, {0: tokens[1]}, {0: tokens[2]}, {}]
    assert [result.last for result in results] == [False, False, False, True]
    assert [(stop.reason, stop.matched_token_id) for result in results for stop in result.stops] == [
        (FinishReason.STOP, tokens[2])
    ]
    assert executor.launches == 4


@pytest.mark.parametrize("settles", [False, True])
def test_the_lag_does_not_depend_on_when_tokens_arrive(settles: bool) -> None:
    tokens = expected_output(PROMPT, 20)
    executor = LateExecutor(CheckingRunner())
    one = OverlappedWorker(64, 4, 8, executor)
    opened = open_row(0, PROMPT, [0, 1, 2, 3, 4], total=20, stop=(tokens[0],))
    results = one.run(StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, 5),)))
    if settles:
        results += one.settle()
    results += one.run(StepPlan(StepId(2))) + one.run(StepPlan(StepId(3))) + one.settle()
    assert steps(results) == [{0: tokens[0]}, {}, {}]
    assert executor.launches == 2


def test_a_row_at_its_length_limit_takes_part_in_no_further_pass() -> None:
    executor = LateExecutor(CheckingRunner())
    one = OverlappedWorker(64, 4, 8, executor)
    results = one.run(
        StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1], total=7),), prefills=(chunk(0, 0, 5),), steps=9)
    )
    results += one.settle()
    assert [result.last for result in results] == [False, True]
    assert [stop.reason for stop in results[1].stops] == [FinishReason.LENGTH]
    assert executor.launches == 2


def test_a_slot_that_was_given_away_gets_none_of_the_earlier_rows_tokens() -> None:
    one = worker()
    one.run(StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1, 2]),), prefills=(chunk(0, 0, 5),)))
    again = open_row(0, [21, 22], [3, 4], total=8)
    plan = StepPlan(StepId(2), closes=(RowSlot(0),), opens=(again,), prefills=(chunk(0, 0, 2),), steps=2)
    results = one.run(plan) + one.settle()
    generated = expected_output([21, 22], 8)
    assert steps(results) == [{}, {0: generated[0]}, {0: generated[1]}]
    assert one.runner.rows.token_ids[0, :4].tolist() == [21, 22, *generated[:2]]


def test_a_slot_that_was_given_away_gets_none_of_the_earlier_rows_embedding() -> None:
    one = worker()
    embedded = replace(open_row(0, PROMPT, [0, 1], total=5), pooling=Pooling.LAST)
    one.run(StepPlan(StepId(1), opens=(embedded,), prefills=(chunk(0, 0, 5),)))
    plan = StepPlan(StepId(2), closes=(RowSlot(0),), opens=(open_row(0, [21, 22], [3]),), prefills=(chunk(0, 0, 2),))
    first, second = one.run(plan) + one.settle()
    assert not first.embeddings
    assert not first.stops
    assert steps([second]) == [{0: expected_output([21, 22], 3)[0]}]


@pytest.mark.parametrize(("rows", "beside"), [(8, [1, 2, 3]), (2, [1]), (1, [])])
def test_warm_up_runs_prompts_with_ever_more_decoding_rows_and_longer_ones_alone(rows: int, beside: list[int]) -> None:
    runner = CheckingRunner()
    spec = EngineSpec("none", max_rows=rows, page_size=4, max_step_tokens=64)
    warm_up(partial(OverlappedRunner, executor=LateExecutor(runner)), runner.capacity, spec)
    mixed = [batch for batch in runner.batches if 0 < batch.decode_rows < batch.rows]
    assert [batch.decode_rows for batch in mixed] == beside
    alone = [batch.max_query_length for batch in runner.batches if batch.rows == 1 and batch.max_query_length > 1]
    assert alone == [8, 32, 48]


def test_warm_up_runs_a_short_and_the_longest_prompt_with_an_adapter_if_there_are_slots() -> None:
    runner = CheckingRunner()
    spec = EngineSpec("none", max_rows=8, page_size=4, max_step_tokens=64)
    warm_up(partial(OverlappedRunner, executor=LateExecutor(runner)), runner.capacity, spec, adapter_slots=2)
    adapted = [batch for batch in runner.batches if batch.adapters is not None]
    assert [batch.max_query_length for batch in adapted] == [8, 48]
    for batch in adapted:
        assert batch.adapters is not None
        assert set(batch.adapters.tolist()) == {0}


def test_warming_up_asks_for_nothing_that_does_not_fit() -> None:
    runner = CheckingRunner()
    executor = LateExecutor(runner)
    make_runner = partial(OverlappedRunner, executor=executor)
    warm_up(make_runner, replace(runner.capacity, max_context=10), EngineSpec("none", max_rows=8, page_size=4))
    assert executor.launches == 0
