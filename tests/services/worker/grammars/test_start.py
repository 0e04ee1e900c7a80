"""The process that compiles grammars starts while the model is loaded, on ranks that may compile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.steps import EngineSpec
from protos.gen.pando.v1 import worker_pb2_grpc
from services.scheduler.wire.steps import spec_to_wire
from services.worker.__main__ import NAME
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.grammars.desk import GrammarDesk, GrammarLimits
from services.worker.peers.reading import PeerReader
from services.worker.rank import Rank
from services.worker.service import WorkerService
from tests.fakes.engine import ScriptedEngine
from tests.services.worker.grammars.fakes import SOURCE, FakeCompiler, Work
from tests.waiting import until, wait_until

if TYPE_CHECKING:
    from pathlib import Path

SPEC = EngineSpec("anything", "auto", max_rows=4)


@dataclass
class Configured:
    """A worker that was configured once, and has made no process."""

    work: Work = field(default_factory=Work)
    library: GrammarLibrary = field(default_factory=lambda: GrammarLibrary(lambda _source: FakeCompiler()))

    async def run(self, folder: Path, spec: EngineSpec, engine: ScriptedEngine) -> None:
        desk = GrammarDesk(self.library, self.work, GrammarLimits())
        rank = Rank(engine, 60.0)
        server = RpcServer(NAME, f"unix:{folder}/worker.sock")
        service = WorkerService(rank, desk, PeerReader(open_channel))
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service)
        await server.start()
        try:
            async with open_channel(server.address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                stages = [message.stage async for message in stub.Configure(spec_to_wire(spec), timeout=60)]
            assert stages[-1] == "ready"
            if self.library.source is None:
                await until(lambda: self.work.closed)
        finally:
            await server.stop(0.1)
            await rank.stop()


async def test_the_process_starts_before_the_model_is_loaded(tmp_path: Path) -> None:
    it = Configured()

    def load() -> None:
        wait_until(lambda: it.work.begun)
        it.library.serve(SOURCE)

    await it.run(tmp_path, SPEC, ScriptedEngine(before_configure=load))
    assert (it.work.begun, it.work.warmed, it.work.closed) == (1, [SOURCE], 0)


async def test_the_process_of_a_model_without_grammars_ends(tmp_path: Path) -> None:
    it = Configured()
    await it.run(tmp_path, SPEC, ScriptedEngine())
    assert (it.work.begun, it.work.warmed, it.work.closed) == (1, [], 1)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, load_format="fake"),
        replace(SPEC, rank=1, world_size=2, rendezvous="127.0.0.1:1"),
        replace(SPEC, only_encodes=True),
    ],
)
async def test_a_rank_that_compiles_nothing_starts_no_process(tmp_path: Path, spec: EngineSpec) -> None:
    it = Configured()
    await it.run(tmp_path, spec, ScriptedEngine())
    assert it.work.begun == 0
