"""The scheduler process between fake neighbours, over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from common.rpc.channel import is_serving, open_channel
from common.rpc.security import read_security
from common.rpc.server import RpcServer
from common.settings import Settings
from common.wire.requests import schedule_request_to_wire
from protos.gen.pando.v1 import (
    common_pb2,
    detokenizer_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    sessions_pb2_grpc,
    worker_pb2_grpc,
)
from services.scheduler.__main__ import NAME, serve
from tests.fakes.detokenizer_service import RecordingDetokenizer
from tests.fakes.worker_service import FakeWorkerService
from tests.services.scheduler.core.harness import make_request
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ADMIN = (("authorization", "Bearer let me in"),)
PROMPT = [(17 * position) % 900 + 10 for position in range(30)]


async def until_state(pipeline: Pipeline, condition: Callable[[scheduler_pb2.GetStateResponse], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition(await pipeline.state()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class Pipeline:
    """A scheduler between two fake workers and a fake detokenizer, all on sockets of one folder."""

    def __init__(
        self,
        folder: Path,
        limits_file: Path | None = None,
        rpc: dict[str, Any] | None = None,
        fleet: dict[str, Any] | None = None,
        **scheduler: Any,
    ) -> None:
        self.workers = [FakeWorkerService(), FakeWorkerService()]
        self.detokenizer = RecordingDetokenizer()  # type: ignore[abstract]  # nobody subscribes
        self.admissions: dict[str, common_pb2.Admission] = {}
        # As reported to the tokenizer, one after the other.
        self.loads: list[scheduler_pb2.SchedulerLoad] = []
        # That of the message with a request's admission.
        self.loads_with: dict[str, scheduler_pb2.SchedulerLoad] = {}
        self._folder = folder
        self._stack = AsyncExitStack()
        self._stopping = asyncio.Event()
        self._worker_servers: list[RpcServer] = []
        section = {
            "address": self.address("scheduler"),
            "workers": (self.address("worker0"), self.address("worker1")),
            "detokenizer": self.address("detokenizer"),
            "page_size": 4,
            "max_rows": 4,
            "max_step_tokens": 16,
            "drain_s": 0.5,
            "admin_token": "let me in",
            **scheduler,
        }
        self.settings = Settings.model_validate(
            {"scheduler": section, "limits": {"file": limits_file}, "rpc": rpc or {}, "fleet": fleet or {}}
        )
        # The name in the scheduler's certificate, if it is not that of its address.
        self.certified_as: str | None = None

    def address(self, name: str) -> str:
        return f"unix:{self._folder}/{name}.sock"

    async def start(self) -> None:
        await self.start_workers()
        await self.start_detokenizer()
        await self._start_scheduler()

    def end(self) -> None:
        """Have the scheduler end, as by SIGTERM."""
        self._stopping.set()

    async def restart(self) -> None:
        """Stop the scheduler, and start another one."""
        self.end()
        self._reader.cancel()
        self._call.cancel()
        await asyncio.gather(self.running, self._reader, return_exceptions=True)
        self._stopping = asyncio.Event()
        await self._start_scheduler()
        await self.ready()

    async def _start_scheduler(self) -> None:
        self.running = asyncio.create_task(serve(self.settings, self._stopping))
        channel = open_channel(self.settings.scheduler.address, read_security(self.settings.rpc), self.certified_as)
        self.channel = await self._stack.enter_async_context(channel)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self.channel)
        self.sessions = sessions_pb2_grpc.SessionsStub(self.channel)
        self._call = self.stub.Submit(wait_for_ready=True)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            self.loads.append(message.load)
            self.loads_with.update({admission.request_id: message.load for admission in message.admissions})
            self.admissions.update({admission.request_id: admission for admission in message.admissions})

    async def start_workers(self) -> None:
        for number, worker in enumerate(self.workers):
            server = RpcServer("pando.v1.Worker", self.address(f"worker{number}"))
            server.add(worker_pb2_grpc.add_WorkerServicer_to_server, worker)
            await server.start()
            self._worker_servers.append(server)

    async def stop_workers(self) -> None:
        for server in self._worker_servers:
            await server.stop(0)
        self._worker_servers = []

    async def start_detokenizer(self) -> None:
        self._detokenizer_server = RpcServer("pando.v1.Detokenizer", self.address("detokenizer"))
        self._detokenizer_server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, self.detokenizer)
        await self._detokenizer_server.start()

    async def stop_detokenizer(self) -> None:
        await self._detokenizer_server.stop(0)

    async def ready(self, *, serving: bool = True) -> None:
        async with asyncio.timeout(30):
            while await is_serving(self.channel, NAME) is not serving:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def submit(
        self,
        name: str,
        prompt: list[int] | None = None,
        *,
        prefill_group: str = "",
        prefill_group_name: str = "",
        **changes: Any,
    ) -> common_pb2.Admission:
        request = schedule_request_to_wire(make_request(name, prompt or PROMPT, **changes))
        request.prefill_group, request.prefill_group_name = prefill_group, prefill_group_name
        return await self.submit_wire(request)

    async def submit_wire(self, request: scheduler_pb2.ScheduleRequest) -> common_pb2.Admission:
        await self._call.write(scheduler_pb2.SchedulerSubmitRequest(schedules=[request]))
        await until(lambda: request.request_id in self.admissions)
        return self.admissions[request.request_id]

    async def note_others(self, *, serve: bool) -> None:
        await self._call.write(scheduler_pb2.SchedulerSubmitRequest(others_serve=serve))

    async def wish_role(self, role: scheduler_pb2.SchedulerRole.ValueType) -> None:
        wish = scheduler_pb2.RoleWish(role=role, reason="a test")
        await self._call.write(scheduler_pb2.SchedulerSubmitRequest(role_wish=wish))

    async def abort(self, name: str) -> None:
        await self._call.write(scheduler_pb2.SchedulerSubmitRequest(aborts=[common_pb2.Abort(request_id=name)]))

    async def finished(self, *names: str) -> None:
        await until(lambda: all(name in self.detokenizer.finishes for name in names))

    async def state(self) -> scheduler_pb2.GetStateResponse:
        return await self.stub.GetState(scheduler_pb2.GetStateRequest(include_requests=True), timeout=30)

    async def stop(self) -> None:
        self.end()
        self._reader.cancel()
        self._call.cancel()
        await asyncio.gather(self.running, self._reader, return_exceptions=True)
        await self._stack.aclose()
        await self.stop_workers()
        await self.stop_detokenizer()
