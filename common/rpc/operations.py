"""The gRPC service `pando.v1.Operations`, with which operators control any service's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import InvalidRequestError
from common.logs import get_logger, set_level
from protos.gen.pando.v1 import operations_pb2, operations_pb2_grpc

if TYPE_CHECKING:
    import grpc

PREFIX = "LOG_LEVEL_"


class OperationsService(operations_pb2_grpc.OperationsServicer):
    """The servicer of `Operations` for this process."""

    async def SetLogLevel(  # noqa: N802  (the contract's name)
        self, request: operations_pb2.SetLogLevelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> operations_pb2.SetLogLevelResponse:
        """Set the log level of this process and return the previous one.

        Raises:
            InvalidRequestError: the level is unset or unknown.
        """
        if request.level not in operations_pb2.LogLevel.values()[1:]:
            raise InvalidRequestError("level must be set to a value of LogLevel", param="level")
        level = operations_pb2.LogLevel.Name(request.level).removeprefix(PREFIX).lower()
        previous = set_level(level)
        get_logger("operations").warning("log.level_changed", level=level, previous=previous)
        return operations_pb2.SetLogLevelResponse(previous=operations_pb2.LogLevel.Value(PREFIX + previous.upper()))
