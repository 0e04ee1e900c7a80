from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.models import resolve_model
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.rpc.stream import wait_until_accepted
from common.tokenization import load_text_model
from common.types import (
    ReplyTo,
    RequestId,
    RequestOptions,
    ScheduleRequest,
    StopConditions,
    Subject,
    SubscriberId,
    View,
)
from common.wire.requests import schedule_request_to_wire
from deploy.evaluation.bench.results import read_results
from deploy.evaluation.experiments.cell.clients import ClientFigures
from deploy.evaluation.experiments.cell.groups import PAGE_SIZE, GeneratingEngine, Outlet
from deploy.evaluation.experiments.cell.plan import CellPlan
from deploy.evaluation.experiments.control_plane_cell import CellFigures, Reading, keep, services_of, table_of
from deploy.evaluation.experiments.simulated_groups import start_group
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.detokenizer.decoding import DecoderFactory
from services.detokenizer.service import DetokenizerService
from services.detokenizer.session import Hub
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import grpc

TOKENS = 5
PROMPT = 3 * PAGE_SIZE


class OneGroup:
    """A generating group, a detokenizer and a subscription."""

    def __init__(self, folder: Path) -> None:
        self.plan = CellPlan(f"{folder}", "", detokenizers=1, gateways=2, step_s=0.001, slow_motion=1, rows=4)
        self.outlet = Outlet(self.plan.detokenizer(0))
        cache = RadixCache(PageAllocator(64), PAGE_SIZE, CacheConfig())
        self.engine = GeneratingEngine(self.plan, 0, cache, (self.outlet,))
        self.hub = Hub(DecoderFactory(load_text_model(resolve_model("smollm2-135m-instruct"))))
        self.tokens: dict[str, int] = {}
        self.finished: dict[str, common_pb2.FinishReason.ValueType] = {}
        self.process: str | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[scheduler_pb2_grpc.SchedulerAsyncStub]:
        server = RpcServer("pando.v1.Detokenizer", self.plan.detokenizer(0))
        server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, DetokenizerService(self.hub))
        await server.start()
        group = await start_group(self.plan.group(0), self.engine)
        async with open_channel(self.plan.detokenizer(0)) as channel, open_channel(self.plan.group(0)) as submission:
            tasks = [asyncio.create_task(self._receive(channel)), asyncio.create_task(self.outlet.run())]
            await until(lambda: self.process and self.outlet.process)
            tasks.append(asyncio.create_task(self.engine.run()))
            try:
                yield scheduler_pb2_grpc.SchedulerStub(submission)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        await group.stop(0)
        await server.stop(0)

    async def _receive(self, channel: grpc.aio.Channel) -> None:
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        call = stub.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id="simulated-0"), wait_for_ready=True)
        self.process = (await wait_until_accepted(call)).process
        async for message in call:
            for delta in message.deltas:
                self.tokens[delta.request_id] = self.tokens.get(delta.request_id, 0) + len(delta.token_ids)
                if delta.HasField("finish"):
                    self.finished[delta.request_id] = delta.finish.reason


def request(name: str, process: str | None) -> scheduler_pb2.ScheduleRequest:
    return schedule_request_to_wire(
        ScheduleRequest(
            RequestId(name),
            View(Subject("tenant", name)),
            ReplyTo(SubscriberId("simulated-0"), process),
            np.arange(PROMPT, dtype=np.int32),
            RequestOptions(stop=StopConditions(max_tokens=TOKENS)),
        )
    )


async def test_a_generating_group_admits_a_request_and_pushes_all_of_its_tokens(tmp_path: Path) -> None:
    cell = OneGroup(tmp_path)
    async with cell.running() as stub:
        call = stub.Submit()
        await wait_until_accepted(call)
        schedules = [request(name, cell.process) for name in "ab"]
        await call.write(scheduler_pb2.SchedulerSubmitRequest(schedules=schedules))
        admitted: list[str] = []
        while len(admitted) < 2:
            answer = await call.read()
            assert isinstance(answer, scheduler_pb2.SchedulerSubmitResponse)
            assert answer.load.serves
            admitted += [each.request_id for each in answer.admissions if not each.HasField("rejected")]
        assert admitted == ["a", "b"]
        await until(lambda: len(cell.finished) == 2)
        call.cancel()
    assert cell.finished == dict.fromkeys("ab", common_pb2.FINISH_REASON_LENGTH)
    assert cell.tokens == dict.fromkeys("ab", TOKENS)
    assert cell.engine.open_choices == 0
    assert cell.engine.cache.commit(View(Subject("tenant", "a")), np.arange(PROMPT + 1, dtype=np.int32)).matched_tokens


async def test_a_group_fills_its_rows_with_answers_of_simulated_gateways(tmp_path: Path) -> None:
    cell = OneGroup(tmp_path)
    async with cell.running():
        cell.engine.fill()
        # The other half of its rows is that of the real gateway.
        await until(lambda: len(cell.finished) == cell.plan.rows // 2)
    assert set(cell.finished.values()) == {common_pb2.FINISH_REASON_LENGTH}
    assert set(cell.tokens) == {"filled-0-0", "filled-0-1"}


def reading(at_s: float, processor_s: float, tokens: float, requests: float) -> Reading:
    names = ("gateway", "tokenizer-0", "tokenizer-1", "detokenizer-0", "Redis: limits", "Redis: fleet.state")
    return Reading(at_s, dict.fromkeys(names, processor_s), tokens, requests, 0, 0, 0)


def test_costs_are_those_of_the_work_without_what_an_idle_process_uses() -> None:
    plan = CellPlan("", "", groups=10, rows=100, step_s=0.1, answer_tokens=50, gateways=4, tokenizers=2, detokenizers=1)
    seen = ClientFigures(events=1000, requests=10, ttft_ms=(1, 1), gap_ms=(1, 1), failures=0)
    idle = reading(0, 0, 0, 0), reading(10, 0.5, 0, 0)
    busy = reading(20, 1, 0, 0), reading(30, 2.5, 4000, 80)
    gateway, tokenizer, detokenizer, limits, fleet = services_of(plan, idle, busy, seen)
    # 5 % of a core are used anyway, so 1 of 1.5 s is that of the work.
    assert gateway.cost_s == pytest.approx(1 / 1000)
    assert tokenizer.cost_s == pytest.approx(2 * 1 / 80)
    assert detokenizer.cost_s == pytest.approx(1 / 4000)
    assert limits.cost_s == pytest.approx(1 / 10)
    assert fleet.cost_s == pytest.approx(1 / 80)
    # 10,000 tokens/s and 200 requests/s, by 4 gateways and 2 tokenizers.
    assert (gateway.planned, tokenizer.planned, detokenizer.planned) == (2500, 100, 10_000)
    assert gateway.planned_share == pytest.approx(0.05 + 2500 / 1000)
    assert gateway.carries == pytest.approx(950)


def test_a_cell_of_one_gateway_has_no_figure_of_simulated_ones(tmp_path: Path) -> None:
    seen = ClientFigures(events=1, requests=1, ttft_ms=(1.0, 2.0), gap_ms=(3.0, 4.0), failures=0)
    for gateways, tokens in ((1, None), (2, 1.5)):
        figures = CellFigures(CellPlan("", "", gateways=gateways), (), 1.0, tokens, 0, seen)
        keep(figures, tmp_path / "cell.json")
        assert ("tokens per message" in str(table_of(figures).title)) == (tokens is not None)
    found = [
        each.value for each in read_results(tmp_path / "cell.json") if each.metric.startswith("tokens per message")
    ]
    assert found == [1.5]
