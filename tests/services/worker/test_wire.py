"""The worker's converter against the scheduler's: what one end encodes, the other end must decode to the same."""

from __future__ import annotations

import pytest
from hypothesis import given

from common.errors import InvalidRequestError
from common.steps import EngineCapacity, EngineSpec, StepPlan, StepResult
from protos.gen.pando.v1 import worker_pb2
from services.scheduler.wire import steps as scheduler
from services.worker import wire as worker
from tests.common.strategies import plain
from tests.examples import examples
from tests.services.worker.strategies import capacities, plans, results, specs


@examples(40)
@given(plans)
def test_plans_survive_the_wire(plan: StepPlan) -> None:
    message = worker_pb2.StepPlan.FromString(scheduler.plan_to_wire(plan).SerializeToString())
    assert plain(worker.plan_from_wire(message)) == plain(plan)


@examples(40)
@given(results)
def test_results_survive_the_wire(result: StepResult) -> None:
    message = worker_pb2.StepResult.FromString(worker.result_to_wire(result).SerializeToString())
    assert plain(scheduler.result_from_wire(message)) == plain(result)


@given(specs)
def test_specs_survive_the_wire(spec: EngineSpec) -> None:
    assert plain(worker.spec_from_wire(scheduler.spec_to_wire(spec))) == plain(spec)


@given(capacities)
def test_capacities_survive_the_wire(capacity: EngineCapacity) -> None:
    assert plain(scheduler.capacity_from_wire(worker.capacity_to_wire(capacity))) == plain(capacity)


def test_a_spec_has_defaults_for_omitted_fields() -> None:
    message = worker_pb2.ConfigureRequest(model="m", page_size_tokens=16, max_rows=4, max_step_tokens=64)
    assert worker.spec_from_wire(message) == EngineSpec("m", max_rows=4, max_step_tokens=64)


@pytest.mark.parametrize("missing", ["model", "page_size_tokens", "max_rows", "max_step_tokens"])
def test_a_spec_without_a_required_field_is_refused(missing: str) -> None:
    message = worker_pb2.ConfigureRequest(model="m", page_size_tokens=16, max_rows=4, max_step_tokens=64)
    message.ClearField(missing)  # type: ignore[arg-type]  # one of the literals above
    with pytest.raises(InvalidRequestError, match=missing):
        worker.spec_from_wire(message)


def test_ranks_that_cannot_be_divided_into_stages_are_refused() -> None:
    message = worker_pb2.ConfigureRequest(
        model="m", page_size_tokens=16, max_rows=4, max_step_tokens=64, world_size=3, pipeline_stages=2
    )
    with pytest.raises(InvalidRequestError, match="3 ranks cannot be divided into 2 stages"):
        worker.spec_from_wire(message)


def test_a_rank_outside_its_group_is_refused() -> None:
    message = worker_pb2.ConfigureRequest(
        model="m", page_size_tokens=16, max_rows=4, max_step_tokens=64, rank=2, world_size=2
    )
    with pytest.raises(InvalidRequestError, match="rank 2"):
        worker.spec_from_wire(message)


def test_a_group_outside_those_that_share_experts_is_refused() -> None:
    message = worker_pb2.ConfigureRequest(
        model="m", page_size_tokens=16, max_rows=4, max_step_tokens=64, data_parallel_rank=2, data_parallel_size=2
    )
    with pytest.raises(InvalidRequestError, match="group 2 of 2"):
        worker.spec_from_wire(message)


def test_a_transfer_without_direction_is_refused() -> None:
    message = worker_pb2.StepPlan(transfers=[worker_pb2.Transfer(transfer_id=3)])
    with pytest.raises(InvalidRequestError, match="transfer 3"):
        worker.plan_from_wire(message)


def test_numbers_out_of_range_turn_negative_so_that_the_engine_refuses_them() -> None:
    message = worker_pb2.StepPlan(opens=[worker_pb2.RowOpen(token_ids=[2**32 - 1], pages=[2**31])])
    (opened,) = worker.plan_from_wire(message).opens
    assert opened.token_ids.tolist() == [-1]
    assert opened.pages.tolist() == [-(2**31)]
