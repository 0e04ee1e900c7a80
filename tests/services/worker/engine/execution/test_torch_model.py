from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.steps import EngineSpec, StepPlan, StepResult
from common.types import FinishReason, RowSlot, StepId
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.torch_model import torch_engine
from tests.fakes.model_runner import PAGE_SIZE, CheckingRunner, spec
from tests.fakes.simulated_worker import SimulatedWorker, expected_output
from tests.services.worker.engine.scenario import RandomScheduler, chunk, grant, open_row, tokens_by_row

if TYPE_CHECKING:
    from services.worker.engine.execution.engine import ModelEngine

PROMPT = [11, 12, 13, 14, 15]


def configured(runner: CheckingRunner, asked: EngineSpec | None = None) -> ModelEngine:
    engine = torch_engine(lambda _spec, _report: runner)
    engine.configure(asked or spec(), lambda _fraction, _stage: None)
    return engine


def run(engine: ModelEngine, plan: StepPlan) -> list[StepResult]:
    results: list[StepResult] = []
    engine.execute(plan, results.append)
    return results


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(st.integers(0, 2**32))
def test_random_plans_give_the_same_results_as_the_reference_worker(device: str, seed: int) -> None:
    runner = CheckingRunner(device=torch.device(device))
    engine = configured(runner)
    reference = SimulatedWorker(pages=4000, page_size=PAGE_SIZE)
    scheduler = RandomScheduler(Random(seed), runner.capacity, max_rows=5)
    for _ in range(15):
        plan = scheduler.plan()
        wanted, got = reference.run(plan), run(engine, plan)
        # The reference goes on when every row has stopped; the engine ends the plan early.
        wanted, surplus = wanted[: len(got)], wanted[len(got) :]
        assert all(not result.rows.size for result in surplus)
        assert [tokens_by_row(result) for result in got] == [tokens_by_row(result) for result in wanted]
        assert [set(result.stops) for result in got] == [set(result.stops) for result in wanted]
        assert [result.last for result in got] == [False] * (len(got) - 1) + [True]
        assert [result.substep for result in got] == list(range(len(got)))
        for result in got:
            scheduler.observe(result)
        assert engine.open_rows == len(scheduler.rows)


@pytest.mark.parametrize("lengths", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_chunking_does_not_change_the_tokens(lengths: list[int]) -> None:
    engine = configured(CheckingRunner())
    opened = (open_row(0, PROMPT, [3, 9, 1], total=9),)
    generated, start = [], 0
    for step, length in enumerate(lengths):
        plan = StepPlan(StepId(step), opens=opened if step == 0 else (), prefills=(chunk(0, start, length),))
        generated += run(engine, plan)[0].token_ids.tolist()
        start += length
    for result in run(engine, StepPlan(StepId(9), steps=3)):
        generated += result.token_ids.tolist()
    assert generated == expected_output(PROMPT, 9)


def test_a_row_that_is_opened_again_with_its_output_goes_on_where_it_was() -> None:
    engine = configured(CheckingRunner())
    wanted = expected_output(PROMPT, 12)
    opened = open_row(2, PROMPT, [0, 1], total=12)
    got = run(engine, StepPlan(StepId(1), opens=(opened,), prefills=(chunk(2, 0, 5),), steps=3))
    generated = [int(result.token_ids[0]) for result in got]
    again = open_row(4, PROMPT + generated, [5, 6, 7], prompt=5, total=12)
    plan = StepPlan(StepId(2), closes=(RowSlot(2),), opens=(again,), prefills=(chunk(4, 0, 8),), steps=4)
    generated += [int(result.token_ids[0]) for result in run(engine, plan)]
    assert generated == wanted


def test_decoding_rows_come_before_chunks_in_a_batch() -> None:
    runner = CheckingRunner()
    engine = configured(runner)
    run(engine, StepPlan(StepId(1), opens=(open_row(7, PROMPT, [0, 1]),), prefills=(chunk(7, 0, 5),)))
    run(engine, StepPlan(StepId(2), opens=(open_row(0, PROMPT, [2, 3]),), prefills=(chunk(0, 0, 3),)))
    batch = runner.batches[-1]
    assert batch.decode_rows == 1
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.key_lengths.tolist() == [6, 3]
    assert batch.sample_indices.tolist() == [0]


def test_a_lease_stops_each_row_at_its_own_end() -> None:
    engine = configured(CheckingRunner())
    stop_id = expected_output(PROMPT, 20)[2]
    opens = (open_row(0, PROMPT, [0, 1, 2], total=20, stop=(stop_id,)), open_row(1, [21, 22], [3, 4, 5], total=6))
    plan = StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5), chunk(1, 0, 2)), steps=8)
    results = run(engine, plan)
    assert [sorted(tokens_by_row(result)) for result in results] == [[0, 1], [0, 1], [0, 1], [1]]
    assert [(stop.row, stop.reason, stop.matched_token_id) for result in results for stop in result.stops] == [
        (0, FinishReason.STOP, stop_id),
        (1, FinishReason.LENGTH, None),
    ]


def test_a_plan_ends_early_when_every_row_has_stopped() -> None:
    engine = configured(CheckingRunner())
    opens = (open_row(0, PROMPT, [0, 1], total=7),)
    results = run(engine, StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5),), steps=100))
    assert [result.last for result in results] == [False, True]


def test_a_plan_with_nothing_to_compute_answers_once() -> None:
    runner = CheckingRunner()
    engine = configured(runner)
    (result,) = run(engine, StepPlan(StepId(1), steps=4))
    assert result.last
    assert not result.rows.size
    assert not runner.batches


def test_a_stopped_row_is_silent_until_it_is_closed() -> None:
    engine = configured(CheckingRunner())
    opens = (open_row(0, PROMPT, [0, 1], total=6),)
    run(engine, StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5),)))
    # The scheduler had not heard of it yet when it sent this.
    (result,) = run(engine, StepPlan(StepId(2), grants=grant(0, [7])))
    assert not result.rows.size
    assert engine.open_rows == 1
    run(engine, StepPlan(StepId(3), closes=(RowSlot(0),)))
    assert engine.open_rows == 0


def test_stop_ids_count_only_from_the_minimum_on() -> None:
    stop_id = expected_output(PROMPT, 7)[1]
    for min_new, stops_at in ((1, 1), (2, None)):
        engine = configured(CheckingRunner())
        opens = (open_row(0, PROMPT, [0, 1], total=7, stop=(stop_id,), min_new=min_new),)
        results = run(engine, StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5),), steps=2))
        reasons = [stop.reason for result in results for stop in result.stops]
        assert reasons == [FinishReason.STOP if stops_at else FinishReason.LENGTH]
        # Before the minimum the id is not even chosen.
        assert (results[1].token_ids[0] == stop_id) == (stops_at is not None)


def test_ranks_other_than_0_report_no_tokens_and_take_those_of_rank_0() -> None:
    runner = CheckingRunner()
    # Rank 1 gets no logits, and what rank 0 sampled.
    compute = runner.forward
    runner.forward = lambda batch: compute(batch)[:0]  # type: ignore[method-assign]
    runner.broadcast_tokens = lambda token_ids: token_ids.fill_(77)  # type: ignore[method-assign]
    engine = configured(runner, spec(rank=1, world_size=2))
    opens = (open_row(0, PROMPT, [0, 1, 2], stop=(77,), min_new=1),)
    results = run(engine, StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5),), steps=4))
    assert [(result.rows.size, result.token_ids.size, result.stops) for result in results] == [(0, 0, ())] * 2
    assert runner.batches[-1].token_ids.tolist() == [77]


def test_reset_frees_all_rows_and_keeps_the_model() -> None:
    runner = CheckingRunner()
    engine = configured(runner)
    plan = StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1]),), prefills=(chunk(0, 0, 5),))
    first = run(engine, plan)
    engine.reset()
    assert engine.open_rows == 0
    assert run(engine, plan)[0].token_ids.tolist() == first[0].token_ids.tolist()
    assert not runner.closed


@pytest.mark.parametrize(
    ("again", "loads"),
    [
        (spec(), 1),
        # What a scheduler asks for once it knows the capacity.
        (spec(device_pages=4000), 1),
        (spec(device_pages=3999), 2),
        (spec(max_rows=9), 2),
    ],
)
def test_an_equal_configuration_reuses_the_loaded_model(again: EngineSpec, loads: int) -> None:
    loaded: list[CheckingRunner] = []

    def load(_spec: EngineSpec, _report: object) -> CheckingRunner:
        loaded.append(CheckingRunner())
        return loaded[-1]

    engine = torch_engine(load)
    engine.configure(spec(), lambda _fraction, _stage: None)
    run(engine, StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1]),)))
    engine.configure(again, lambda _fraction, _stage: None)
    assert len(loaded) == loads
    assert loaded[0].closed == (loads == 2)
    assert engine.open_rows == 0


def test_ranks_of_a_group_always_load_the_model_again() -> None:
    runners = [CheckingRunner(), CheckingRunner()]
    fresh = iter(runners)
    engine = torch_engine(lambda _spec, _report: next(fresh))
    for _ in range(2):
        engine.configure(spec(world_size=2), lambda _fraction, _stage: None)
    assert [runner.closed for runner in runners] == [True, False]


def test_an_invalid_plan_computes_nothing() -> None:
    runner = CheckingRunner()
    engine = configured(runner)
    with pytest.raises(InvalidPlanError):
        run(engine, StepPlan(StepId(1), opens=(open_row(0, PROMPT),), prefills=(chunk(0, 0, 5),)))
    assert not runner.batches


def test_keeping_a_cpu_warm_does_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = CheckingRunner()
    engine = configured(runner)
    for _ in range(3):
        engine.keep_warm()
    assert [record.message for record in caplog.records if "keep_warm_ms" in record.message] == [
        "worker.keep_warm_ms changes nothing here: a CPU needs no work to stay fast"
    ]
    assert not runner.batches


@pytest.mark.gpu
def test_keeping_a_gpu_warm_computes_nothing_of_the_model() -> None:
    runner = CheckingRunner(device=torch.device("cuda"))
    engine = configured(runner)
    for _ in range(3):
        engine.keep_warm()
    torch.cuda.synchronize()
    assert not runner.batches
    engine.close()
