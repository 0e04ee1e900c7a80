"""Weights that are replaced while requests run, wait and arrive: nothing is lost, and no version mixes with another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID
from tests.services.scheduler.pipeline import ADMIN, PROMPT, Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

DRAIN = scheduler_pb2.WEIGHTS_UPDATE_MODE_DRAIN
RECOMPUTE = scheduler_pb2.WEIGHTS_UPDATE_MODE_RECOMPUTE
ABORT = scheduler_pb2.WEIGHTS_UPDATE_MODE_ABORT


def output(max_tokens: int = 8) -> list[int]:
    return expected_output(PROMPT, len(PROMPT) + max_tokens, (STOP_ID,))


def update(
    pipeline: Pipeline, mode: scheduler_pb2.WeightsUpdateMode.ValueType, model: str = "newer", version: str = ""
) -> Awaitable[scheduler_pb2.UpdateWeightsResponse]:
    request = scheduler_pb2.UpdateWeightsRequest(model=model, mode=mode, weight_version=version)
    return pipeline.stub.UpdateWeights(request, timeout=60, metadata=ADMIN)


async def start(pipeline: Pipeline, name: str, max_tokens: int = 30) -> None:
    """Have a request run slowly."""
    for worker in pipeline.workers:
        worker.step_s = 0.02
    await pipeline.submit(name, max_tokens=max_tokens)
    await until(lambda: len(pipeline.detokenizer.output_of(name)) >= 2)


def models(pipeline: Pipeline) -> list[list[str]]:
    return [[request.model for request in worker.configured] for worker in pipeline.workers]


def on_host(state: scheduler_pb2.GetStateResponse) -> int:
    """Return the pages of the host tier that hold copies."""
    (host,) = (tier for tier in state.tiers if tier.tier == "host")
    return host.capacity_pages - host.free_pages


@pytest.fixture
def base(pipeline: Pipeline) -> str:
    return pipeline.workers[0].configured[0].model


async def test_draining_finishes_what_runs_before_the_new_weights_compute_what_waits(
    pipeline: Pipeline, base: str
) -> None:
    await start(pipeline, "old")
    replacing = asyncio.ensure_future(update(pipeline, DRAIN, version="tuesday"))
    await asyncio.sleep(0.1)
    await pipeline.submit("new")
    await pipeline.finished("old")
    assert models(pipeline) == [[base]] * 2, "the weights are replaced after the last request has finished"
    assert "new" not in pipeline.detokenizer.tokens
    answer = await replacing
    assert (answer.weight_version, answer.running_requests) == ("tuesday", 1)
    await pipeline.finished("new")
    assert pipeline.detokenizer.output_of("old") == output(30)
    assert pipeline.detokenizer.output_of("new") == output()
    assert models(pipeline) == [[base, "newer"]] * 2
    assert pipeline.detokenizer.versions == {"old": "default", "new": "tuesday"}
    state = await pipeline.state()
    assert (state.weights, state.weight_version) == ("newer", "tuesday")


async def test_no_page_of_the_old_weights_is_matched(pipeline: Pipeline) -> None:
    await pipeline.submit("first")
    await pipeline.finished("first")
    await pipeline.submit("second")
    await pipeline.finished("second")
    assert pipeline.detokenizer.cached["second"] > 0
    await update(pipeline, DRAIN)
    await pipeline.submit("third")
    await pipeline.finished("third")
    assert pipeline.detokenizer.cached["third"] == 0
    await pipeline.submit("fourth")
    await pipeline.finished("fourth")
    assert pipeline.detokenizer.cached["fourth"] > 0


async def test_no_page_of_the_old_weights_is_matched_on_the_host(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, host_tier={"pages": 64})
    await pipeline.start()
    await pipeline.ready()
    await pipeline.submit("first")
    await pipeline.finished("first")
    await until_state(pipeline, lambda state: on_host(state) > 0)
    await update(pipeline, DRAIN)
    assert on_host(await pipeline.state()) == 0
    await pipeline.submit("second")
    await pipeline.finished("second")
    assert pipeline.detokenizer.cached["second"] == 0
    assert pipeline.detokenizer.output_of("second") == output()
    await pipeline.stop()


async def test_recomputing_continues_with_the_new_weights(pipeline: Pipeline, base: str) -> None:
    await start(pipeline, "both")
    answer = await update(pipeline, RECOMPUTE)
    assert (answer.weight_version, answer.running_requests) == ("1", 1)
    assert "both" not in pipeline.detokenizer.finishes
    await pipeline.finished("both")
    assert pipeline.detokenizer.output_of("both") == output(30)
    assert models(pipeline) == [[base, "newer"]] * 2
    assert pipeline.detokenizer.versions["both"] == "1"
    opened = [row for plan in pipeline.workers[0].plans for row in plan.opens]
    assert [row.computed_tokens for row in opened] == [0, 0]


async def test_aborting_ends_what_runs_and_starts_what_waits(pipeline: Pipeline) -> None:
    for index in range(2):
        await start(pipeline, f"runs{index}", max_tokens=60)
    await pipeline.stub.Pause(scheduler_pb2.PauseRequest(), metadata=ADMIN)
    await pipeline.submit("waits")
    await update(pipeline, ABORT)
    await pipeline.stub.Resume(scheduler_pb2.ResumeRequest(), metadata=ADMIN)
    await pipeline.finished("waits", *(f"runs{index}" for index in range(2)))
    for index in range(2):
        finish = pipeline.detokenizer.finishes[f"runs{index}"].finish
        assert finish.reason == common_pb2.FINISH_REASON_ABORT
    assert pipeline.detokenizer.output_of("waits") == output()
    assert pipeline.detokenizer.versions["waits"] == "1"


async def test_weights_that_do_not_fit_one_rank_are_loaded_by_none(pipeline: Pipeline, base: str) -> None:
    pipeline.workers[1].misfits["newer"] = "newer lacks tensors of the loaded model: 'model.norm.weight'"
    await start(pipeline, "patient")
    with pytest.raises(grpc.aio.AioRpcError, match=r"lacks tensors .*model\.norm") as error:
        await update(pipeline, RECOMPUTE)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await pipeline.finished("patient")
    assert pipeline.detokenizer.output_of("patient") == output(30)
    assert models(pipeline) == [[base]] * 2
    assert (await pipeline.state()).weight_version == "default"


async def test_weights_that_one_rank_cannot_load_are_rolled_back_on_all(pipeline: Pipeline, base: str) -> None:
    pipeline.workers[1].unloadable["newer"] = "a shard is damaged"
    await start(pipeline, "patient")
    with pytest.raises(grpc.aio.AioRpcError, match=r"not replaced.*a shard is damaged") as error:
        await update(pipeline, RECOMPUTE)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await pipeline.finished("patient")
    assert pipeline.detokenizer.output_of("patient") == output(30)
    assert models(pipeline) == [[base, "newer", base]] * 2
    assert (await pipeline.state()).weight_version == "default"
    del pipeline.workers[1].unloadable["newer"]
    assert (await update(pipeline, RECOMPUTE)).weight_version == "1"


async def test_weights_are_read_beside_the_old_ones_while_requests_run(pipeline: Pipeline, base: str) -> None:
    await start(pipeline, "running", max_tokens=60)
    for worker in pipeline.workers:
        worker.prepares.clear()
    replacing = asyncio.ensure_future(update(pipeline, RECOMPUTE))
    await until(lambda: all(worker.prepared == ["newer"] for worker in pipeline.workers))
    known = len(pipeline.detokenizer.output_of("running"))
    await until(lambda: len(pipeline.detokenizer.output_of("running")) >= known + 3)
    assert models(pipeline) == [[base]] * 2
    for worker in pipeline.workers:
        worker.prepares.set()
    answer = await replacing
    assert answer.loaded_beside
    assert answer.paused_seconds > 0
    await pipeline.finished("running")
    assert pipeline.detokenizer.output_of("running") == output(60)


async def test_where_one_rank_has_no_room_they_are_loaded_in_place(pipeline: Pipeline, base: str) -> None:
    pipeline.workers[1].has_room = False
    assert not (await update(pipeline, DRAIN)).loaded_beside
    assert models(pipeline) == [[base, "newer"]] * 2


async def test_weights_that_one_rank_cannot_read_interrupt_nothing(pipeline: Pipeline, base: str) -> None:
    """A file that has changed since the check, for example."""
    await start(pipeline, "running")
    pipeline.workers[1].unreadable["newer"] = "its files have changed while they were read"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await update(pipeline, ABORT)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "have changed" in (refused.value.details() or "")
    await pipeline.finished("running")
    assert pipeline.detokenizer.output_of("running") == output(30)
    assert models(pipeline) == [[base]] * 2
    assert [worker.prepared for worker in pipeline.workers] == [["newer", ""]] * 2, "what was read is forgotten"


async def test_ranks_that_die_while_they_read_leave_the_old_weights(pipeline: Pipeline, base: str) -> None:
    await start(pipeline, "running")
    for worker in pipeline.workers:
        worker.prepares.clear()
    replacing = asyncio.ensure_future(update(pipeline, RECOMPUTE))
    await until(lambda: all(worker.prepared for worker in pipeline.workers))
    await pipeline.stop_workers()
    for worker in pipeline.workers:
        worker.process = "second"
        worker.prepares.set()
    await pipeline.start_workers()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await replacing
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    await pipeline.finished("running")
    assert pipeline.detokenizer.output_of("running") == output(30)
    assert models(pipeline) == [[base, base]] * 2
    assert (await pipeline.state()).weight_version == "default"
    assert (await update(pipeline, DRAIN)).weight_version == "1", "the next one succeeds"


async def test_a_rank_that_dies_while_it_loads_gets_the_new_weights_when_it_is_back(pipeline: Pipeline) -> None:
    await start(pipeline, "running")
    pipeline.workers[1].failures_to_load = 1
    assert (await update(pipeline, RECOMPUTE)).weight_version == "1"
    await pipeline.finished("running")
    assert pipeline.detokenizer.output_of("running") == output(30)
    assert [requests[-1] for requests in models(pipeline)] == ["newer"] * 2


async def test_an_update_after_a_rank_has_failed_is_refused_and_not_taken_for_done(
    pipeline: Pipeline, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' errors are waited for meanwhile, and the group is configured with the weights that it had."""
    monkeypatch.setattr("services.scheduler.group.REASON_GRACE_S", 3.0)
    await start(pipeline, "running")
    pipeline.workers[1].fail_at_step = 0
    await until(lambda: pipeline.workers[1].fail_at_step is None)
    await asyncio.sleep(0.2)
    with pytest.raises(grpc.aio.AioRpcError, match="the workers were lost before"):
        await update(pipeline, RECOMPUTE)
    await pipeline.finished("running")
    assert pipeline.detokenizer.output_of("running") == output(30)
    assert models(pipeline) == [[base, base]] * 2


async def test_of_two_updates_at_once_the_second_is_refused(pipeline: Pipeline) -> None:
    await start(pipeline, "slow", max_tokens=60)
    first = asyncio.ensure_future(update(pipeline, DRAIN, "one"))
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.aio.AioRpcError, match="another update") as error:
        await update(pipeline, ABORT, "two")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await first
    await pipeline.finished("slow")
    assert pipeline.detokenizer.output_of("slow") == output(60)


async def test_ranks_that_restart_load_the_current_weights(pipeline: Pipeline, base: str) -> None:
    await update(pipeline, DRAIN)
    await pipeline.stop_workers()
    await pipeline.ready(serving=False)
    for worker in pipeline.workers:
        worker.process = "second"
    await pipeline.start_workers()
    await pipeline.ready()
    await pipeline.submit("after")
    await pipeline.finished("after")
    assert models(pipeline) == [[base, "newer", "newer"]] * 2
    assert pipeline.detokenizer.versions["after"] == "1"


async def test_a_scheduler_that_restarts_keeps_its_workers_weights(pipeline: Pipeline, base: str) -> None:
    await update(pipeline, DRAIN, version="tuesday")
    await pipeline.restart()
    await until_state(pipeline, lambda state: state.weight_version)
    state = await pipeline.state()
    assert (state.weights, state.weight_version) == ("newer", "tuesday")
    assert models(pipeline) == [[base, "newer", "newer"]] * 2
    *_, replaced, restarted = pipeline.workers[0].configured
    assert restarted.base_model == base
    # By these the worker knows that it has what is asked for.
    assert replaced.device_pages == pipeline.workers[0].pages
    assert (replaced.chosen_device_pages, replaced.chosen_host_pages) == (True, True)
    assert [request.reload_weights for request in pipeline.workers[0].configured] == [False, True, False]
    assert (restarted.HasField("device_pages"), restarted.HasField("host_pages")) == (False, False)


@pytest.mark.parametrize(("model", "mode", "version"), [("", DRAIN, ""), ("newer", 0, ""), ("newer", DRAIN, "a\nb")])
async def test_a_malformed_update_is_refused(pipeline: Pipeline, model: str, mode: int, version: str) -> None:
    request = scheduler_pb2.UpdateWeightsRequest(model=model, weight_version=version)
    request.mode = mode  # type: ignore[assignment]  # any number
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await pipeline.stub.UpdateWeights(request, timeout=60, metadata=ADMIN)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_only_administrators_replace_weights(pipeline: Pipeline) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await pipeline.stub.UpdateWeights(scheduler_pb2.UpdateWeightsRequest(model="newer", mode=DRAIN), timeout=60)
    assert error.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
