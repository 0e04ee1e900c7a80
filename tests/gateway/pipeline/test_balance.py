"""Several tokenizers and detokenizers: which get requests, and what is lost with one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from common.rpc.peers import servers_at
from common.types import RequestId
from gateway.metrics import GatewayMetrics
from gateway.pipeline import detokenizer_peer
from gateway.pipeline.client import GrpcPipeline
from gateway.pipeline.model import GrpcModel
from protos.gen.pando.v1 import common_pb2, tokenizer_pb2_grpc
from tests.fakes.pipeline_servers import DETOKENIZER, TOKENIZER, FakeServices
from tests.gateway.pipeline.test_client import Notes, request
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from common.rpc.sessions import SessionHost


@dataclass
class Two:
    """Two tokenizers and two detokenizers, and a client of all."""

    sides: tuple[FakeServices, FakeServices]
    pipeline: GrpcPipeline

    async def up(self, tokenizers: int = 2, detokenizers: int = 2) -> None:
        await until(
            lambda: (
                len(self.pipeline._tokenizers.connected) == tokenizers
                and len(self.pipeline._detokenizers.connected) == detokenizers
            )
        )

    def sent(self) -> list[int]:
        """Return the number of requests that each tokenizer got."""
        return [len(side.requests) for side in self.sides]

    def replies(self) -> Counter[int]:
        """Return the number of requests whose output each detokenizer got."""
        requests = [request for side in self.sides for request in side.requests]
        owners = {name: number for number, side in enumerate(self.sides) for name in side.subscribers}
        return Counter(owners[request.reply_to.subscriber_id] for request in requests)


@asynccontextmanager
async def two(folder: Path, automatic: int = 1_000_000) -> AsyncIterator[Two]:
    sides = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        sides.append(FakeServices(folder / name, automatic=automatic))
    # A scheduler sends output to either detokenizer.
    sides[1]._mailboxes = sides[0]._mailboxes
    for side in sides:
        await side.start(TOKENIZER)
        await side.start(DETOKENIZER)
    tokenizers, detokenizers = ([side.address(kind) for side in sides] for kind in (TOKENIZER, DETOKENIZER))
    pipeline = GrpcPipeline(servers_at(tokenizers), servers_at(detokenizers), GatewayMetrics(CollectorRegistry()))
    running = asyncio.create_task(pipeline.run())
    both = Two((sides[0], sides[1]), pipeline)
    try:
        await both.up()
        yield both
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        for side in sides:
            await side.stop()


async def test_open_requests_are_distributed_equally_over_both_of_each(tmp_path: Path) -> None:
    async with two(tmp_path, automatic=0) as services:
        for number in range(60):
            services.pipeline.submit(request(f"r{number}"), Notes())
        await until(lambda: sum(services.sent()) == 60)
        assert services.sent() == [30, 30]
        assert services.replies() == {0: 30, 1: 30}


async def test_requests_one_after_the_other_take_turns(tmp_path: Path) -> None:
    async with two(tmp_path) as services:
        for number in range(12):
            notes = Notes()
            services.pipeline.submit(request(f"r{number}"), notes)
            await until(partial(lambda notes: notes.text == "Hello world", notes))
        assert services.sent() == [6, 6]
        assert services.replies() == {0: 6, 1: 6}


async def test_calls_about_the_model_go_to_any_tokenizer_that_is_left(tmp_path: Path) -> None:
    async with two(tmp_path) as services:
        channel = services.pipeline.tokenizer_channel()
        sessions: SessionHost = services.sides[0]
        model = GrpcModel(tokenizer_pb2_grpc.TokenizerStub(channel), sessions)
        await services.sides[0].kill(TOKENIZER)
        await services.up(tokenizers=1)
        for _ in range(4):
            assert (await model.get_model()).name == "tiny"


async def test_a_dead_detokenizer_loses_only_its_own_requests(tmp_path: Path) -> None:
    async with two(tmp_path, automatic=1) as services:
        notes = [Notes() for _ in range(8)]
        for number, each in enumerate(notes):
            services.pipeline.submit(request(f"r{number}"), each)
        await until(lambda: all(each.deltas for each in notes))
        await services.sides[0].kill(DETOKENIZER)
        await until(lambda: sum(len(each.lost) for each in notes) == 4)
        await until(lambda: sum(len(side.aborts) for side in services.sides) == 4)
        for side in services.sides:
            side.release.set()
        await until(lambda: sum(each.text == "Hello world" for each in notes) == 4)
        again = Notes()
        services.pipeline.submit(request("again"), again)
        await until(lambda: again.text == "Hello world")
        assert services.sides[1].subscribers[-1] in {
            side.requests[-1].reply_to.subscriber_id for side in services.sides if side.requests
        }


async def test_a_dead_tokenizer_loses_only_what_it_had_not_admitted_and_the_other_one_gets_the_aborts(
    tmp_path: Path,
) -> None:
    async with two(tmp_path, automatic=1) as services:
        dying, staying = services.sides
        dying.admits = False
        notes = [Notes() for _ in range(8)]
        for number, each in enumerate(notes):
            services.pipeline.submit(request(f"r{number}"), each)
        await until(lambda: services.sent() == [4, 4])
        await until(lambda: sum(bool(each.admissions) for each in notes) == 4)
        await dying.kill(TOKENIZER)
        await until(lambda: sum(len(each.lost) for each in notes) == 4)
        assert not any(each.lost and each.admissions for each in notes)
        await until(lambda: len(staying.aborts) == 4)
        assert set(staying.aborts) == {one.request_id for one in dying.requests}


async def test_an_abort_goes_to_the_tokenizer_of_its_request(tmp_path: Path) -> None:
    async with two(tmp_path, automatic=1) as services:
        for number in range(8):
            services.pipeline.submit(request(f"r{number}"), Notes())
        await until(lambda: services.sent() == [4, 4])
        for number in range(8):
            services.pipeline.abort(RequestId(f"r{number}"))
        for side in services.sides:
            await until(partial(lambda side: len(side.aborts) == 4, side))
            assert sorted(side.aborts) == sorted(one.request_id for one in side.requests)


async def test_services_that_drain_get_no_new_requests(tmp_path: Path) -> None:
    async with two(tmp_path) as services:
        draining = services.sides[0]
        await draining.set_serving(TOKENIZER, False)
        await draining.set_serving(DETOKENIZER, False)
        await until(
            lambda: (
                sum(peer.is_preferred for peer in services.pipeline._tokenizers) == 1
                and sum(peer.is_preferred for peer in services.pipeline._detokenizers) == 1
            )
        )
        for number in range(6):
            services.pipeline.submit(request(f"r{number}"), Notes())
        await until(lambda: services.sent() == [0, 6])
        assert services.replies() == {1: 6}


async def test_a_detokenizer_that_a_scheduler_does_not_reach_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenizer_peer, "AVOIDED_S", 600.0)
    async with two(tmp_path) as services:
        refusal = common_pb2.RequestError(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="not connected to it")
        for side in services.sides:
            side.rejection = refusal
        notes = Notes()
        services.pipeline.submit(request("refused"), notes)
        await until(lambda: notes.admissions)
        [avoided] = services.replies()
        for side in services.sides:
            side.rejection = None
        for number in range(4):
            services.pipeline.submit(request(f"r{number}"), Notes())
        await until(lambda: sum(services.sent()) == 5)
        assert services.replies() == {avoided: 1, 1 - avoided: 4}
