"""The scheduler process as its neighbours see it: real gRPC, a simulated worker, a recording detokenizer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from prometheus_client import REGISTRY

from common.errors import ConfigurationError
from common.grammars import Grammar, GrammarKind
from common.types import GroupRole
from common.wire.requests import schedule_request_to_wire
from protos.gen.pando.v1 import (
    common_pb2,
    scheduler_pb2,
)
from services.scheduler.core.suspects import QUARANTINED_AFTER
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, make_request
from tests.services.scheduler.pipeline import ADMIN, PROMPT, Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def output(max_tokens: int = 8, prompt: list[int] = PROMPT) -> list[int]:
    return expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))


async def test_tokens_reach_the_detokenizer_and_all_ranks_run_the_same_plans(pipeline: Pipeline) -> None:
    admission = await pipeline.submit("one")
    assert not admission.HasField("rejected")
    assert admission.prompt_tokens == len(PROMPT)
    await pipeline.finished("one")
    assert pipeline.detokenizer.output_of("one") == output()
    await until(lambda: len(pipeline.workers[0].plans) == len(pipeline.workers[1].plans))
    pairs = zip(*(worker.plans for worker in pipeline.workers), strict=True)
    assert all(lhs.step_id == rhs.step_id and lhs.prefills == rhs.prefills for lhs, rhs in pairs)
    assert [request.rank for worker in pipeline.workers for request in worker.configured] == [0, 1]


async def test_a_bad_request_is_rejected_alone(pipeline: Pipeline) -> None:
    bad = scheduler_pb2.ScheduleRequest(request_id="bad", token_ids=[1])
    good = schedule_request_to_wire(make_request("good", PROMPT))
    await pipeline._call.write(scheduler_pb2.SchedulerSubmitRequest(schedules=[bad, good]))
    await until(lambda: {"bad", "good"} <= set(pipeline.admissions))
    assert pipeline.admissions["bad"].rejected.code == common_pb2.ERROR_CODE_INVALID_REQUEST
    await pipeline.finished("good")


async def test_an_abort_frees_row_and_pages(pipeline: Pipeline) -> None:
    pipeline.workers[0].step_s = 0.02
    await pipeline.submit("endless", max_tokens=None)
    await until(lambda: pipeline.detokenizer.output_of("endless"))
    await pipeline.abort("endless")
    await pipeline.finished("endless")
    assert pipeline.detokenizer.finishes["endless"].finish.reason == common_pb2.FINISH_REASON_ABORT
    state = await pipeline.state()
    assert (state.running_rows, state.waiting_requests, len(state.requests)) == (0, 0, 0)
    tier = state.tiers[0]
    assert tier.free_pages + tier.evictable_pages == tier.capacity_pages


async def test_the_role_is_exported_for_autoscalers(pipeline: Pipeline) -> None:
    def roles() -> list[str]:
        names = [role.value for role in GroupRole]
        return [name for name in names if REGISTRY.get_sample_value("pando_scheduler_role", {"role": name}) == 1]

    await until(lambda: roles() == ["both"])
    change = scheduler_pb2.SetRoleRequest(role=scheduler_pb2.SCHEDULER_ROLE_PREFILL)
    await pipeline.stub.SetRole(change, timeout=30, metadata=ADMIN)
    await until(lambda: roles() == ["prefill"])


async def test_the_share_of_pages_in_use_is_exported_for_autoscalers(pipeline: Pipeline) -> None:
    def percent() -> float:
        return REGISTRY.get_sample_value("pando_scheduler_kv_usage_percent") or 0.0

    pipeline.workers[0].step_s = 0.02
    await pipeline.submit("endless", max_tokens=None)
    await until(lambda: 0 < percent() <= 100)
    await pipeline.abort("endless")
    await until(lambda: percent() == 0)


async def test_stop_text_found_by_the_detokenizer_ends_the_row(pipeline: Pipeline) -> None:
    pipeline.detokenizer.stop_after["stopped"] = 3
    pipeline.workers[0].step_s = 0.01
    await pipeline.submit("stopped", max_tokens=60)
    await until(lambda: len(pipeline.detokenizer.output_of("stopped")) >= 3)
    await until_state(pipeline, lambda state: not state.running_rows)
    assert len(pipeline.detokenizer.output_of("stopped")) < 60


async def test_a_request_whose_gateway_is_gone_is_ended(pipeline: Pipeline) -> None:
    pipeline.detokenizer.gone.add("orphan")
    pipeline.workers[0].step_s = 0.01
    await pipeline.submit("orphan", max_tokens=60)
    await until_state(pipeline, lambda state: not state.requests)
    assert len(pipeline.detokenizer.output_of("orphan")) < 60


@pytest.mark.parametrize("how", ["error", "death"])
async def test_rows_go_on_after_the_workers_come_back(pipeline: Pipeline, how: str) -> None:
    for worker in pipeline.workers:
        worker.step_s = 0.01
    if how == "error":
        pipeline.workers[1].fail_at_step = 6
    await pipeline.submit("patient", max_tokens=30)
    await until(lambda: len(pipeline.detokenizer.output_of("patient")) >= 3 or len(pipeline.workers[0].configured) > 1)
    if how == "death":
        await pipeline.stop_workers()
        await until(lambda: pipeline.running)
        await pipeline.start_workers()
    await pipeline.finished("patient")
    assert pipeline.detokenizer.output_of("patient") == output(30)
    assert all([request.resumes for request in worker.configured] == [False, True] for worker in pipeline.workers)
    # What was found out at the first start is kept, so that what was admitted still fits.
    assert pipeline.workers[0].configured[1].device_pages == 64


@pytest.mark.parametrize("effect", ["error", "death"])
async def test_a_request_that_ends_the_engine_gets_an_error_and_the_others_go_on(
    pipeline: Pipeline, effect: str
) -> None:
    fatal = pipeline.workers[1]
    fatal.fatal_token, fatal.fatal_effect = 5, effect
    for worker in pipeline.workers:
        worker.step_s = 0.01
    prompts = {f"innocent{index}": [100 + index, *PROMPT] for index in range(3)}
    for name, prompt in prompts.items():
        await pipeline.submit(name, prompt, max_tokens=30)
    await pipeline.submit("culprit", [5, *PROMPT], max_tokens=30)
    await pipeline.finished("culprit", *prompts)
    error = pipeline.detokenizer.finishes["culprit"].finish.error
    assert error.code == common_pb2.ERROR_CODE_INTERNAL
    assert not error.retryable
    assert "repeatedly ended the engine" in error.message
    assert len(fatal.configured) == 1 + QUARANTINED_AFTER
    for name, prompt in prompts.items():
        assert pipeline.detokenizer.output_of(name) == output(30, prompt)
    # Nothing of it is left: another request is served at once, and the same one is refused at once.
    await pipeline.submit("next", max_tokens=3)
    await pipeline.finished("next")
    refused = await pipeline.submit("repeated", [5, *PROMPT])
    assert "repeatedly ended the engine" in refused.rejected.message
    assert len(fatal.configured) == 1 + QUARANTINED_AFTER


async def test_all_requests_end_if_the_engine_fails_at_every_plan(pipeline: Pipeline) -> None:
    pipeline.workers[0].fatal_token = PROMPT[0]
    names = [f"r{index}" for index in range(3)]
    for name in names:
        await pipeline.submit(name)
    await pipeline.finished(*names)
    errors = {pipeline.detokenizer.finishes[name].finish.error.code for name in names}
    assert errors == {common_pb2.ERROR_CODE_INTERNAL}
    assert len(pipeline.workers[0].configured) <= 1 + QUARANTINED_AFTER * len(names)


async def test_broken_connections_to_a_worker_are_no_failures_of_its_engine(pipeline: Pipeline) -> None:
    fatal = pipeline.workers[1]
    fatal.fatal_token, fatal.fatal_effect = 5, "broken connection"
    await pipeline.submit("unlucky", [5, *PROMPT], max_tokens=10)
    await until(lambda: len(fatal.configured) > 2 * QUARANTINED_AFTER)
    fatal.fatal_token = None
    await pipeline.finished("unlucky")
    assert pipeline.detokenizer.output_of("unlucky") == output(10, [5, *PROMPT])


async def test_a_grammar_request_is_refused_for_a_retry_if_a_rank_is_lost_while_another_compiles(
    pipeline: Pipeline,
) -> None:
    healthy, failing = pipeline.workers
    healthy.compiles.clear()
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+", "regex")
    submitting = asyncio.create_task(pipeline.submit("bound", grammar=grammar))
    await until(lambda: healthy.compiling)
    failing.fail_at_step = 0
    await pipeline.submit("any")
    refused = (await submitting).rejected
    assert refused.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert refused.retryable
    # Its place among the waiting ones is free again, so the same request can be submitted under the same id.
    healthy.compiles.set()
    await pipeline.finished("any")
    del pipeline.admissions["bound"]
    assert not (await pipeline.submit("bound", grammar=grammar)).HasField("rejected")
    await pipeline.finished("bound")


async def test_after_a_restart_rows_with_grammars_wait_until_these_are_compiled_and_others_do_not(
    pipeline: Pipeline,
) -> None:
    """They used to be cut short where compiling took longer than a pass may wait."""
    worker = pipeline.workers[0]
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+", "regex")
    worker.step_s = 0.02
    await pipeline.submit("bound", max_tokens=40, grammar=grammar)
    await until(lambda: pipeline.detokenizer.output_of("bound"))
    worker.compiles.clear()
    worker.fail_at_step = 0
    await until(lambda: worker.compiling)
    await pipeline.submit("free")
    await pipeline.finished("free")
    known = pipeline.detokenizer.output_of("bound")
    assert len(known) < 40
    assert all(opened.request_id != "bound" for plan in worker.plans[-3:] for opened in plan.opens)
    worker.compiles.set()
    await pipeline.finished("bound")
    assert pipeline.detokenizer.output_of("bound") == output(40)


async def test_a_grammar_that_cannot_be_compiled_again_ends_its_requests_with_the_reason(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.grammar_recovery.RETRY_S", 0.01)
    worker = pipeline.workers[0]
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+", "regex")
    worker.step_s = 0.02
    await pipeline.submit("bound", max_tokens=40, grammar=grammar)
    await pipeline.submit("free", max_tokens=40)
    await until(lambda: pipeline.detokenizer.output_of("bound"))
    worker.grammar_refusal = "'regex' cannot be followed: it takes longer than 30 s to compile."
    worker.fail_at_step = 0
    await pipeline.finished("bound", "free")
    error = pipeline.detokenizer.finishes["bound"].finish.error
    assert error.message == worker.grammar_refusal
    assert pipeline.detokenizer.output_of("free") == output(40)


@pytest.mark.parametrize("others_serve", [True, False])
async def test_without_workers_requests_are_handed_back_if_another_group_would_serve(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, *, others_serve: bool
) -> None:
    monkeypatch.setattr("services.scheduler.hand_back.HAND_BACK_S", 0.5)
    pipeline.workers[0].step_s = 0.2
    await pipeline.note_others(serve=others_serve)
    # Four rows run, one request waits.
    names = [str(number) for number in range(5)]
    for name in names:
        await pipeline.submit(name, max_tokens=90)
    await until(lambda: pipeline.detokenizer.output_of("3"))
    await pipeline.stop_workers()
    pipeline.workers[0].step_s = 0
    if others_serve:
        await until(lambda: set(names) <= set(pipeline.detokenizer.finishes))
        error = pipeline.detokenizer.finishes["4"].finish.error
        assert (error.code, error.retryable) == (common_pb2.ERROR_CODE_UNAVAILABLE, True)
    else:
        await asyncio.sleep(1.5)
        assert len((await pipeline.state()).requests) == 5
    await pipeline.start_workers()
    await pipeline.finished(*names)


async def test_a_failed_load_is_retried_with_growing_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.group.RECONNECT_S", 0.02)
    pipeline = Pipeline(tmp_path)
    pipeline.workers[0].failures_to_load = 3
    started = time.monotonic()
    await pipeline.start()
    await pipeline.ready()
    # 0.04 s, 0.08 s and 0.16 s between them.
    assert time.monotonic() - started > 0.25
    assert len(pipeline.workers[0].configured) == 4
    await pipeline.submit("patient")
    await pipeline.finished("patient")
    await pipeline.stop()


async def test_a_hanging_worker_is_treated_as_dead(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, worker_timeout_s=0.5)
    await pipeline.start()
    await pipeline.ready()
    pipeline.workers[0].hangs = True
    await pipeline.submit("slow")
    await until(lambda: len(pipeline.workers[0].configured) > 1)
    pipeline.workers[0].hangs = False
    await pipeline.finished("slow")
    assert pipeline.detokenizer.output_of("slow") == output()
    await pipeline.stop()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_does_not_answer_heartbeats_is_treated_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr("services.scheduler.heartbeats.HEARTBEAT_S", 0.1)
    pipeline = Pipeline(tmp_path)
    silent, other = pipeline.workers[rank], pipeline.workers[1 - rank]
    await pipeline.start()
    await pipeline.ready()
    # Longer than the heartbeats that it may miss, although its results still arrive.
    silent.step_s = 0.1
    await pipeline.submit("slow", max_tokens=60)
    await until(lambda: pipeline.detokenizer.output_of("slow"))
    silent.answers.clear()
    await until_state(pipeline, lambda state: state.worker_group == "FAILED")
    silent.answers.set()
    await until(lambda: len(other.configured) > 1)
    silent.step_s = 0.0
    await pipeline.finished("slow")
    assert pipeline.detokenizer.output_of("slow") == output(60)
    await pipeline.stop()


async def test_a_silent_rank_is_given_up_sooner_if_another_group_would_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.heartbeats.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("services.scheduler.heartbeats.SILENT_BEATS_ALONE", 1_000_000)
    pipeline = Pipeline(tmp_path)
    await pipeline.start()
    await pipeline.ready()
    await pipeline.note_others(serve=True)
    pipeline.workers[1].answers.clear()
    await until_state(pipeline, lambda state: state.worker_group == "FAILED")
    pipeline.workers[1].answers.set()
    await pipeline.ready()
    await pipeline.stop()


async def test_requests_of_a_silent_rank_are_handed_back_at_once_if_another_group_would_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.heartbeats.HEARTBEAT_S", 0.1)
    # Requests of ranks whose links have broken would stay here, as the ranks return soon.
    monkeypatch.setattr("services.scheduler.hand_back.HAND_BACK_S", 1_000_000.0)
    pipeline = Pipeline(tmp_path)
    pipeline.workers[0].step_s = 0.1
    await pipeline.start()
    await pipeline.ready()
    await pipeline.note_others(serve=True)
    await pipeline.submit("slow", max_tokens=60)
    await until(lambda: pipeline.detokenizer.output_of("slow"))
    pipeline.workers[1].answers.clear()
    await until_state(pipeline, lambda state: state.worker_group == "FAILED")
    pipeline.workers[1].answers.set()
    pipeline.workers[0].step_s = 0.0
    await pipeline.finished("slow")
    error = pipeline.detokenizer.finishes["slow"].finish.error
    assert (error.code, error.retryable) == (common_pb2.ERROR_CODE_UNAVAILABLE, True)
    await pipeline.stop()


async def test_a_rank_whose_engine_hangs_is_treated_as_dead_also_if_it_reports_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.heartbeats.HEARTBEAT_S", 0.1)
    pipeline = Pipeline(tmp_path, worker_timeout_s=20)
    await pipeline.start()
    await pipeline.ready()
    first, second = pipeline.workers
    first.step_s = 0.1
    await pipeline.submit("slow", max_tokens=60)
    await until(lambda: pipeline.detokenizer.output_of("slow"))
    second.heartbeat_age_s = 21.0
    await until(lambda: len(second.configured) > 1)
    first.step_s = second.heartbeat_age_s = 0.0
    await pipeline.finished("slow")
    assert pipeline.detokenizer.output_of("slow") == output(60)
    await pipeline.stop()


@pytest.mark.parametrize("rank", [0, 1])
async def test_lost_plans_are_noticed_by_a_rank_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr("services.scheduler.heartbeats.HEARTBEAT_S", 0.1)
    pipeline = Pipeline(tmp_path)
    await pipeline.start()
    await pipeline.ready()
    worker = pipeline.workers[rank]
    # Rank 0 waits in vain for the others: as in a collective.
    pipeline.workers[0].loses_plans = worker.loses_plans = True
    worker.open_plans = 0
    await pipeline.submit("slow")
    await until(lambda: len(worker.configured) > 1)
    await pipeline.finished("slow")
    assert pipeline.detokenizer.output_of("slow") == output()
    await pipeline.stop()


async def test_a_rank_that_waits_for_a_slow_one_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.heartbeats.HEARTBEAT_S", 0.1)
    # As while its stage computes a long prompt, or its process is stopped.
    pipeline = Pipeline(tmp_path)
    slow, quick = pipeline.workers
    slow.step_s = 1.0
    await pipeline.start()
    await pipeline.ready()
    slow.open_plans, quick.open_plans = 1, 0
    await pipeline.submit("slow", max_tokens=1)
    await pipeline.finished("slow")
    assert len(quick.plans) > 0
    assert [len(worker.configured) for worker in pipeline.workers] == [1, 1]
    await pipeline.stop()


async def test_prefixes_come_back_from_the_host_of_ranks_that_take_different_times(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, host_tier={"pages": 64}, device_pages=16)
    for worker, passes in zip(pipeline.workers, (5, 1), strict=True):
        worker.pages, worker.transfer_passes = 16, passes
    await pipeline.start()
    await pipeline.ready()
    other = [prompt + 400 for prompt in range(48)]
    for name, prompt in (("cold", PROMPT), ("flood", other), ("warm", PROMPT)):
        await pipeline.submit(name, prompt=prompt)
        await pipeline.finished(name)
        assert pipeline.detokenizer.output_of(name) == output(prompt=prompt)
    assert pipeline.detokenizer.cached["warm"] == 28
    await until_state(pipeline, lambda state: not state.host_tier.open_transfers)
    state = await pipeline.state()
    moved = {traffic.direction: traffic.pages for traffic in state.host_tier.traffic}
    assert moved["host_to_device"] > 0
    assert [tier.tier for tier in state.tiers][:2] == ["device", "host"]
    assert all(tier.protected_pages == 0 for tier in state.tiers)
    await pipeline.stop()


async def test_a_refused_configuration_ends_the_process(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    pipeline.workers[1].refusal = "no such model: x"
    await pipeline.start()
    with pytest.raises(ConfigurationError, match="no such model: x"):
        await asyncio.wait_for(asyncio.shield(pipeline.running), 30)
    await pipeline.stop()


async def test_without_its_detokenizer_it_refuses_requests_and_drops_the_open_ones(pipeline: Pipeline) -> None:
    pipeline.workers[0].step_s = 0.02
    await pipeline.submit("cut off", max_tokens=90)
    await until(lambda: pipeline.detokenizer.output_of("cut off"))
    await pipeline.stop_detokenizer()
    await until_state(pipeline, lambda state: not state.requests)
    await pipeline.ready(serving=False)
    refused = await pipeline.submit("too early")
    assert refused.rejected.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert refused.rejected.retryable
    await pipeline.start_detokenizer()
    await pipeline.ready()
    pipeline.workers[0].step_s = 0.0
    await pipeline.submit("again")
    await pipeline.finished("again")
    assert pipeline.detokenizer.output_of("again") == output()


async def test_a_request_is_known_to_the_detokenizer_while_it_waits(pipeline: Pipeline) -> None:
    await pipeline.stub.Pause(scheduler_pb2.PauseRequest(), timeout=30, metadata=ADMIN)
    await pipeline.submit("waiting")
    await until(lambda: "waiting" in pipeline.detokenizer.opened)
    assert "waiting" not in pipeline.detokenizer.cached


async def test_flush_frees_pages_and_pause_holds_requests_until_resume(pipeline: Pipeline) -> None:
    await pipeline.submit("first")
    await pipeline.finished("first")
    freed = await pipeline.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30, metadata=ADMIN)
    assert freed.freed_pages > 0
    await pipeline.stub.Pause(scheduler_pb2.PauseRequest(), timeout=30, metadata=ADMIN)
    await pipeline.submit("second")
    state = await pipeline.state()
    assert state.paused
    assert [request.phase for request in state.requests] == ["WAITING"]
    await pipeline.stub.Resume(scheduler_pb2.ResumeRequest(), timeout=30, metadata=ADMIN)
    await pipeline.finished("second")
    assert pipeline.detokenizer.cached["second"] == 0


async def test_without_workers_the_scheduler_reports_itself_unavailable(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    pipeline.workers = []
    await pipeline.start()
    rejected = (await pipeline.submit("early")).rejected
    assert rejected.code == common_pb2.ERROR_CODE_UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pipeline.stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=30, metadata=ADMIN)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await pipeline.state()).worker_group == "CONNECTING"
    await pipeline.stop()


async def test_a_stopping_scheduler_lets_open_requests_finish(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, drain_s=30)
    await pipeline.start()
    await pipeline.ready()
    pipeline.workers[0].step_s = 0.005
    await pipeline.submit("last words", max_tokens=20)
    pipeline._stopping.set()
    await pipeline.finished("last words")
    assert pipeline.detokenizer.output_of("last words") == output(20)
    await asyncio.wait_for(asyncio.gather(pipeline.running, return_exceptions=True), 30)
    await pipeline.stop()


async def test_a_rank_out_of_memory_makes_all_ranks_restart_with_smaller_steps(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, max_step_tokens=64)
    for worker in pipeline.workers:
        worker.most_tokens = 20
    # Rank 0 only notices that rank 1 has left, and may well say so first.
    pipeline.workers[0].fails_with_others = True
    await pipeline.start()
    await pipeline.ready()
    prompts = {name: [ord(name), *PROMPT] for name in ("a", "b")}
    for name, prompt in prompts.items():
        await pipeline.submit(name, prompt)
    await pipeline.finished(*prompts)
    for name, prompt in prompts.items():
        assert pipeline.detokenizer.output_of(name) == output(prompt=prompt)
    # They are configured as before: only the plans are smaller, and the same for both.
    configured = [[request.max_step_tokens for request in worker.configured] for worker in pipeline.workers]
    assert configured == [[64, 64]] * 2
    await until(lambda: len(pipeline.workers[0].plans) == len(pipeline.workers[1].plans))
    sizes = [[sum(chunk.length for chunk in plan.prefills) for plan in worker.plans] for worker in pipeline.workers]
    assert sizes[0] == sizes[1]
    assert sorted(sizes[0])[-1] > 20 >= sorted(sizes[0])[-2]
    await pipeline.stop()


@pytest.mark.parametrize("is_asked_for", [True, False])
async def test_windowed_layers_have_a_separate_pool_unless_decisions_are_logged(
    tmp_path: Path, is_asked_for: bool
) -> None:
    log = None if is_asked_for else tmp_path / "decisions"
    pipeline = Pipeline(tmp_path, cache={"decision_log": log})
    for worker in pipeline.workers:
        worker.window, worker.step_s = (20, 10), 0.005
    await pipeline.start()
    await pipeline.ready()
    pipeline.workers[1].fail_at_step = 4
    for name in ("a", "b"):
        await pipeline.submit(name, [ord(name), *PROMPT], max_tokens=20)
    await pipeline.finished("a", "b")
    for name in ("a", "b"):
        assert pipeline.detokenizer.output_of(name) == output(20, [ord(name), *PROMPT])
    state = await pipeline.state()
    assert [tier.tier for tier in state.tiers] == (["device", "device_window"] if is_asked_for else ["device"])
    if is_asked_for:
        window = state.tiers[1]
        assert (window.capacity_pages, window.protected_pages) == (20, 0)
        # After the loss it asks for what it had.
        assert [request.window_pages for request in pipeline.workers[0].configured] == [0, 20]
    await pipeline.stop()
