"""The scheduler process as its neighbours see it: real gRPC, a simulated worker, a recording detokenizer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from prometheus_client import REGISTRY

from common.errors import ConfigurationError
from common.wire import schedule_request_to_wire
from protos.gen.pando.v1 import (
    common_pb2,
    scheduler_pb2,
)
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, make_request
from tests.services.scheduler.ring import ADMIN, PROMPT, Ring, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def output(max_tokens: int = 8, prompt: list[int] = PROMPT) -> list[int]:
    return expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))


async def test_tokens_reach_the_detokenizer_and_all_ranks_run_the_same_plans(ring: Ring) -> None:
    admission = await ring.submit("one")
    assert not admission.HasField("rejected")
    assert admission.prompt_tokens == len(PROMPT)
    await ring.finished("one")
    assert ring.detokenizer.output_of("one") == output()
    await until(lambda: len(ring.workers[0].plans) == len(ring.workers[1].plans))
    pairs = zip(*(worker.plans for worker in ring.workers), strict=True)
    assert all(lhs.step_id == rhs.step_id and lhs.prefills == rhs.prefills for lhs, rhs in pairs)
    assert [request.rank for worker in ring.workers for request in worker.configured] == [0, 1]


async def test_a_bad_request_is_rejected_alone(ring: Ring) -> None:
    bad = scheduler_pb2.ScheduleRequest(request_id="bad", token_ids=[1])
    good = schedule_request_to_wire(make_request("good", PROMPT))
    await ring._call.write(scheduler_pb2.SchedulerSubmitRequest(schedules=[bad, good]))
    await until(lambda: {"bad", "good"} <= set(ring.admissions))
    assert ring.admissions["bad"].rejected.code == common_pb2.ERROR_CODE_INVALID_REQUEST
    await ring.finished("good")


async def test_an_abort_frees_row_and_pages(ring: Ring) -> None:
    ring.workers[0].step_s = 0.02
    await ring.submit("endless", max_tokens=None)
    await until(lambda: ring.detokenizer.output_of("endless"))
    await ring.abort("endless")
    await ring.finished("endless")
    assert ring.detokenizer.finishes["endless"].finish.reason == common_pb2.FINISH_REASON_ABORT
    state = await ring.state()
    assert (state.running_rows, state.waiting_requests, len(state.requests)) == (0, 0, 0)
    tier = state.tiers[0]
    assert tier.free_pages + tier.evictable_pages == tier.capacity_pages


async def test_the_share_of_pages_in_use_is_told_to_who_scales(ring: Ring) -> None:
    def percent() -> float:
        return REGISTRY.get_sample_value("pando_scheduler_kv_usage_percent") or 0.0

    ring.workers[0].step_s = 0.02
    await ring.submit("endless", max_tokens=None)
    await until(lambda: 0 < percent() <= 100)
    await ring.abort("endless")
    await until(lambda: percent() == 0)


async def test_stop_text_found_by_the_detokenizer_ends_the_row(ring: Ring) -> None:
    ring.detokenizer.stop_after["stopped"] = 3
    ring.workers[0].step_s = 0.01
    await ring.submit("stopped", max_tokens=60)
    await until(lambda: len(ring.detokenizer.output_of("stopped")) >= 3)
    await until_state(ring, lambda state: not state.running_rows)
    assert len(ring.detokenizer.output_of("stopped")) < 60


async def test_a_request_whose_gateway_is_gone_is_ended(ring: Ring) -> None:
    ring.detokenizer.gone.add("orphan")
    ring.workers[0].step_s = 0.01
    await ring.submit("orphan", max_tokens=60)
    await until_state(ring, lambda state: not state.requests)
    assert len(ring.detokenizer.output_of("orphan")) < 60


@pytest.mark.parametrize("how", ["error", "death"])
async def test_rows_go_on_after_the_workers_come_back(ring: Ring, how: str) -> None:
    for worker in ring.workers:
        worker.step_s = 0.01
    if how == "error":
        ring.workers[1].fail_at_step = 6
    await ring.submit("patient", max_tokens=30)
    await until(lambda: len(ring.detokenizer.output_of("patient")) >= 3 or len(ring.workers[0].configured) > 1)
    if how == "death":
        await ring.stop_workers()
        await until(lambda: ring.running)
        await ring.start_workers()
    await ring.finished("patient")
    assert ring.detokenizer.output_of("patient") == output(30)
    assert all(len(worker.configured) == 2 for worker in ring.workers)
    # What was found out at the first start is kept, so that what was admitted still fits.
    assert ring.workers[0].configured[1].device_pages == 64


async def test_what_fails_while_it_loads_is_tried_again_more_and_more_rarely(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.workers[0].failures_to_load = 3
    started = time.monotonic()
    await ring.start()
    await ring.ready()
    # 0.4 s, 0.8 s and 1.6 s between them.
    assert time.monotonic() - started > 2.5
    assert len(ring.workers[0].configured) == 4
    await ring.submit("patient")
    await ring.finished("patient")
    await ring.stop()


async def test_a_worker_that_hangs_is_taken_for_dead(tmp_path: Path) -> None:
    ring = Ring(tmp_path, worker_timeout_s=0.5)
    await ring.start()
    await ring.ready()
    ring.workers[0].hangs = True
    await ring.submit("slow")
    await until(lambda: len(ring.workers[0].configured) > 1)
    ring.workers[0].hangs = False
    await ring.finished("slow")
    assert ring.detokenizer.output_of("slow") == output()
    await ring.stop()


async def test_prefixes_come_back_from_the_host_of_ranks_that_take_different_times(tmp_path: Path) -> None:
    ring = Ring(tmp_path, cache_host_pages=64, device_pages=16)
    for worker, passes in zip(ring.workers, (5, 1), strict=True):
        worker.pages, worker.transfer_passes = 16, passes
    await ring.start()
    await ring.ready()
    other = [prompt + 400 for prompt in range(48)]
    for name, prompt in (("cold", PROMPT), ("flood", other), ("warm", PROMPT)):
        await ring.submit(name, prompt=prompt)
        await ring.finished(name)
        assert ring.detokenizer.output_of(name) == output(prompt=prompt)
    assert ring.detokenizer.cached["warm"] == 28
    await until_state(ring, lambda state: not state.host_tier.open_transfers)
    state = await ring.state()
    moved = {traffic.direction: traffic.pages for traffic in state.host_tier.traffic}
    assert moved["host_to_device"] > 0
    assert [tier.tier for tier in state.tiers][:2] == ["device", "host"]
    assert all(tier.protected_pages == 0 for tier in state.tiers)
    await ring.stop()


async def test_a_refused_configuration_ends_the_process(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.workers[1].refusal = "no such model: x"
    await ring.start()
    with pytest.raises(ConfigurationError, match="no such model: x"):
        await asyncio.wait_for(asyncio.shield(ring.running), 30)
    await ring.stop()


async def test_without_its_detokenizer_it_serves_nobody_and_forgets_what_that_knew(ring: Ring) -> None:
    ring.workers[0].step_s = 0.02
    await ring.submit("cut off", max_tokens=90)
    await until(lambda: ring.detokenizer.output_of("cut off"))
    await ring.stop_detokenizer()
    await until_state(ring, lambda state: not state.requests)
    await ring.ready(serving=False)
    refused = await ring.submit("too early")
    assert refused.rejected.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert refused.rejected.retryable
    await ring.start_detokenizer()
    await ring.ready()
    ring.workers[0].step_s = 0.0
    await ring.submit("again")
    await ring.finished("again")
    assert ring.detokenizer.output_of("again") == output()


async def test_a_request_is_known_to_the_detokenizer_while_it_waits(ring: Ring) -> None:
    await ring.stub.Pause(scheduler_pb2.PauseRequest(), timeout=30, metadata=ADMIN)
    await ring.submit("waiting")
    await until(lambda: "waiting" in ring.detokenizer.opened)
    assert "waiting" not in ring.detokenizer.cached


async def test_flush_pause_and_resume_do_what_they_say(ring: Ring) -> None:
    await ring.submit("first")
    await ring.finished("first")
    freed = await ring.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30, metadata=ADMIN)
    assert freed.freed_pages > 0
    await ring.stub.Pause(scheduler_pb2.PauseRequest(), timeout=30, metadata=ADMIN)
    await ring.submit("second")
    state = await ring.state()
    assert state.paused
    assert [request.phase for request in state.requests] == ["WAITING"]
    await ring.stub.Resume(scheduler_pb2.ResumeRequest(), timeout=30, metadata=ADMIN)
    await ring.finished("second")
    assert ring.detokenizer.cached["second"] == 0


async def test_before_the_workers_are_there_it_says_so(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.workers = []
    await ring.start()
    rejected = (await ring.submit("early")).rejected
    assert rejected.code == common_pb2.ERROR_CODE_UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ring.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30, metadata=ADMIN)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await ring.state()).worker_group == "CONNECTING"
    await ring.stop()


async def test_a_stopping_scheduler_lets_open_requests_finish(tmp_path: Path) -> None:
    ring = Ring(tmp_path, drain_s=30)
    await ring.start()
    await ring.ready()
    ring.workers[0].step_s = 0.005
    await ring.submit("last words", max_tokens=20)
    ring._stopping.set()
    await ring.finished("last words")
    assert ring.detokenizer.output_of("last words") == output(20)
    await asyncio.wait_for(asyncio.gather(ring.running, return_exceptions=True), 30)
    await ring.stop()


async def test_a_rank_without_memory_for_a_step_makes_all_ranks_start_anew_with_smaller_ones(tmp_path: Path) -> None:
    ring = Ring(tmp_path, max_step_tokens=64)
    for worker in ring.workers:
        worker.most_tokens = 20
    # Rank 0 only notices that rank 1 has left, and may well say so first.
    ring.workers[0].fails_with_others = True
    await ring.start()
    await ring.ready()
    prompts = {name: [ord(name), *PROMPT] for name in ("a", "b")}
    for name, prompt in prompts.items():
        await ring.submit(name, prompt)
    await ring.finished(*prompts)
    for name, prompt in prompts.items():
        assert ring.detokenizer.output_of(name) == output(prompt=prompt)
    # They are configured as before: only the plans are smaller, and the same for both.
    configured = [[request.max_step_tokens for request in worker.configured] for worker in ring.workers]
    assert configured == [[64, 64]] * 2
    await until(lambda: len(ring.workers[0].plans) == len(ring.workers[1].plans))
    sizes = [[sum(chunk.length for chunk in plan.prefills) for plan in worker.plans] for worker in ring.workers]
    assert sizes[0] == sizes[1]
    assert sorted(sizes[0])[-1] > 20 >= sorted(sizes[0])[-2]
    await ring.stop()


@pytest.mark.parametrize("is_asked_for", [True, False])
async def test_layers_with_a_window_have_a_pool_of_their_own_if_asked_for(tmp_path: Path, is_asked_for: bool) -> None:
    ring = Ring(tmp_path, **({} if is_asked_for else {"window_ratio": 0.0}))
    for worker in ring.workers:
        worker.window, worker.step_s = (20, 10), 0.005
    await ring.start()
    await ring.ready()
    ring.workers[1].fail_at_step = 4
    for name in ("a", "b"):
        await ring.submit(name, [ord(name), *PROMPT], max_tokens=20)
    await ring.finished("a", "b")
    for name in ("a", "b"):
        assert ring.detokenizer.output_of(name) == output(20, [ord(name), *PROMPT])
    state = await ring.state()
    assert [tier.tier for tier in state.tiers] == (["device", "device_window"] if is_asked_for else ["device"])
    if is_asked_for:
        window = state.tiers[1]
        assert (window.capacity_pages, window.protected_pages) == (20, 0)
        # After the loss it asks for what it had.
        assert [request.window_pages for request in ring.workers[0].configured] == [0, 20]
    await ring.stop()
