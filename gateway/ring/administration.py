"""What administrators ask of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf.json_format import MessageToDict

from common.errors import UnavailableError
from common.rpc.status import to_error
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    from protos.gen.pando.v1 import scheduler_pb2_grpc

TIMEOUT_S = 10.0


class GrpcAdministration:
    """Implements `gateway.ring.port.Administration`."""

    def __init__(self, stub: scheduler_pb2_grpc.SchedulerAsyncStub | None) -> None:
        """Ask the scheduler behind `stub`; None if none is configured."""
        self._stub = stub

    async def flush_cache(self) -> int:
        """Drop every cache entry that no running request needs."""
        stub = self._scheduler()
        try:
            return (await stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=TIMEOUT_S)).freed_pages
        except grpc.RpcError as error:
            raise to_error(error) from error

    async def state(self) -> dict[str, object]:
        """Return the scheduler's figures, as JSON."""
        stub = self._scheduler()
        try:
            answer = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise to_error(error) from error
        return MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    def _scheduler(self) -> scheduler_pb2_grpc.SchedulerAsyncStub:
        if self._stub is None:
            raise UnavailableError("this gateway has no way to the scheduler (gateway.scheduler)")
        return self._stub
