from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from protos.gen.pando.v1 import worker_pb2_grpc
from services.worker.__main__ import NAME
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.grammars.desk import GrammarDesk, GrammarLimits
from services.worker.grammars.process import CompileProcesses
from services.worker.peers.reading import PeerReader
from services.worker.rank import Rank
from services.worker.service import WorkerService

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from services.worker.engine.execution.interface import Engine
    from services.worker.profiles import ProfileRules

Serve = Callable[..., Awaitable["worker_pb2_grpc.WorkerAsyncStub"]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Serve an engine over real gRPC on a unix socket; call it with the engine (and a patience in seconds)."""
    async with AsyncExitStack() as stack:

        async def start(
            engine: Engine,
            stuck_after_s: float = 10.0,
            profile_rules: ProfileRules | None = None,
            keep_warm_s: float = 0.0,
            ends: asyncio.Event | None = None,
        ) -> worker_pb2_grpc.WorkerAsyncStub:
            rank = Rank(engine, stuck_after_s, profile_rules, keep_warm_s)
            rank.needs_new_process = ends or rank.needs_new_process
            desk = GrammarDesk(GrammarLibrary(), CompileProcesses(), GrammarLimits())
            server = RpcServer(NAME, f"unix:{tmp_path}/worker.sock")
            server.add(
                worker_pb2_grpc.add_WorkerServicer_to_server, WorkerService(rank, desk, PeerReader(open_channel))
            )
            await server.start()
            channel = open_channel(server.address)
            stack.push_async_callback(rank.stop)
            stack.push_async_callback(desk.close)
            stack.push_async_callback(server.stop, 0.1)
            stack.push_async_callback(channel.close)
            return worker_pb2_grpc.WorkerStub(channel)

        yield start
