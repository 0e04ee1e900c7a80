from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from common.types import CacheMode, ScheduleRequest
from deploy.evaluation.bench.offline import evaluate
from deploy.evaluation.bench.pipeline_client import PipelineClient, PipelineError, PipelineRecord, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.workloads.random_text import random_sessions
from tests.fakes.echo_pipeline import CACHED_TOKENS, running_pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.evaluation.bench.records import BenchRequest

WORK = [session.requests[0] for session in random_sessions(5, 20, 7)]


def encoded(work: list[BenchRequest] = WORK) -> list[ScheduleRequest]:
    return schedule_requests(work, PromptMaker(), 0.6, CacheMode.DEFAULT)


async def drive(mode: str, timeout_s: float = 10.0) -> list[PipelineRecord]:
    async with running_pipeline(mode) as pipeline, PipelineClient(pipeline.address, pipeline.address) as client:
        return await client.run(encoded(), timeout_s)


async def test_every_token_and_finish_is_counted() -> None:
    records = await drive("finish")
    assert [(record.tokens, record.prompt_tokens, record.cached_tokens) for record in records] == [
        (7, 20, CACHED_TOKENS)
    ] * 5
    run = evaluate(WORK, records)
    assert (run.input_tokens, run.output_tokens, run.expected_tokens, run.cached_tokens) == (100, 35, 35, 15)
    assert run.output_tokens_per_s == pytest.approx(35 / run.duration_s)
    assert run.first_token_s is not None


async def test_several_batches_go_over_one_connection() -> None:
    async with running_pipeline() as pipeline, PipelineClient(pipeline.address, pipeline.address) as client:
        for _ in range(3):
            assert sum(record.tokens for record in await client.run(encoded(), 10)) == 35
        assert len({request.request_id for request in pipeline.requests}) == 15
        assert len(pipeline.mailboxes) == 1
        assert (await client.get_state()).running_rows == 7


async def test_requests_match_the_workload_and_have_one_subject_each() -> None:
    async with running_pipeline() as pipeline, PipelineClient(pipeline.address, pipeline.address) as client:
        await client.run(encoded(), 10)
        await client.run(encoded(), 10)
    assert {(len(r.token_ids), r.stop.max_tokens, r.stop.ignore_eos, r.n) for r in pipeline.requests} == {
        (20, 7, True, 1)
    }
    assert {round(request.sampling.temperature, 3) for request in pipeline.requests} == {0.6}
    assert len({request.view.subject.name for request in pipeline.requests}) == 10
    assert [r.token_ids for r in pipeline.requests[:5]] == [r.token_ids for r in pipeline.requests[5:]]


@pytest.mark.parametrize(("mode", "message"), [("reject", "queue_full: too many"), ("fail", "took too long")])
async def test_a_failed_request_leaves_no_figure(mode: str, message: str) -> None:
    records = await drive(mode)
    with pytest.raises(PipelineError, match=message):
        evaluate(WORK, records)


async def test_missing_tokens_show() -> None:
    run = evaluate(WORK, await drive("short"))
    assert (run.output_tokens, run.expected_tokens) == (30, 35)


async def test_requests_that_never_finish_time_out() -> None:
    with pytest.raises(PipelineError, match="5 requests had not finished"):
        await drive("hang", timeout_s=0.2)


async def test_a_broken_stream_ends_the_run() -> None:
    async with running_pipeline("hang") as pipeline, PipelineClient(pipeline.address, pipeline.address) as client:
        await client.start(encoded())
        waiting = asyncio.create_task(client.finish(10))
        await asyncio.sleep(0.05)
        pipeline.break_streams()
        with pytest.raises(PipelineError, match="detokenizer broke"):
            await waiting


async def test_an_unreachable_service_is_named(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    async with running_pipeline() as pipeline:
        with pytest.raises(PipelineError, match=f"scheduler at {address}"):
            async with PipelineClient(address, pipeline.address):
                pass
