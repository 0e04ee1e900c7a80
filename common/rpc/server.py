"""The gRPC server of every service: health, reflection, log level (`pando.v1.Operations`), interceptors, stop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from common.audit.log import NoAudit
from common.errors import ConfigurationError, InvalidRequestError
from common.logs import get_logger, set_level
from common.rpc.interceptors import CallerGuard, ServerInterceptor, accept_every_caller
from common.rpc.options import SERVER_OPTIONS
from common.rpc.security import UNIX, UNIX_ONLY, TokenGuard
from protos.gen.pando.v1 import operations_pb2, operations_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.audit.log import Audit
    from common.rpc.security import Security

Servicer = TypeVar("Servicer")
PREFIX = "LOG_LEVEL_"


class RpcServer:
    """One service at one address.

    Health names: "" is SERVING while the process runs, the full service name while it can serve (`set_serving`).
    """

    def __init__(
        self,
        service: str,
        address: str,
        security: Security = UNIX_ONLY,
        *,
        also: tuple[str, ...] = (),
        audit: Audit | None = None,
    ) -> None:
        """Prepare the server of `service` (full name, e.g. "pando.v1.Worker") at host:port or unix:path.

        `also` names other services that will be added, for reflection. `audit` records changes of the log level.
        """
        self.service = service
        self.address = address
        self.port = 0
        self.probe_port: int | None = None
        self._security = security
        guards = [TokenGuard(security.token)] if security.token and not address.startswith(UNIX) else []
        names_callers = security.files is not None and not address.startswith(UNIX)
        check = CallerGuard(service, security.names).check if names_callers else accept_every_caller
        self._server = grpc.aio.server(interceptors=[*guards, ServerInterceptor(check)], options=SERVER_OPTIONS)
        self._probes: grpc.aio.Server | None = None
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        operations_pb2_grpc.add_OperationsServicer_to_server(OperationsService(audit or NoAudit()), self._server)
        operations = operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name
        names = (
            service,
            *also,
            operations,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, self._server)

    def add(self, register: Callable[[Servicer, grpc.aio.Server], None], servicer: Servicer) -> None:
        """Register a servicer with its generated `add_…Servicer_to_server`."""
        register(servicer, self._server)

    async def start(self) -> None:
        """Start to listen. Health reports the process as alive, and the service after `set_serving(True)`.

        Raises:
            ConfigurationError: the address is in use, cannot be bound, or is TCP without permission (`needs_tls`).
        """
        if self.address.startswith(UNIX):
            _remove_stale_socket(Path(self.address.removeprefix(UNIX)))
        try:
            if self._security.needs_tls(self.address):
                self.port = self._server.add_secure_port(self.address, self._security.server_credentials())
            else:
                self.port = self._server.add_insecure_port(self.address)
            await self._start_probes()
        except RuntimeError as error:
            raise ConfigurationError(f"{self.service} cannot listen on {self.address}: {error}") from error
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the service's health: whether a request would be served now."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(self.service, state)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report NOT_SERVING, wait up to `grace_s` seconds for open calls, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        if self._probes is not None:
            await self._probes.stop(0)

    async def _start_probes(self) -> None:
        """Serve only health, in plaintext, at the probe port if one is configured."""
        if self._security.probe_port is None or self.address.startswith(UNIX):
            return
        self._probes = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
        host = self.address.rpartition(":")[0]
        self.probe_port = self._probes.add_insecure_port(f"{host}:{self._security.probe_port}")
        await self._probes.start()


def _remove_stale_socket(path: Path) -> None:
    """Unlink the socket that a killed predecessor left; two live servers never share a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_socket():
        os.unlink(path)


class OperationsService(operations_pb2_grpc.OperationsServicer):
    """The servicer of `Operations` for this process."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

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
        async with self._audit.act("log.set_level", {"peer": context.peer()}, {"level": level}):
            previous = set_level(level)
        get_logger("operations").warning("log.level_changed", level=level, previous=previous)
        return operations_pb2.SetLogLevelResponse(previous=operations_pb2.LogLevel.Value(PREFIX + previous.upper()))
