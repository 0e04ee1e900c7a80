"""The clients of each served model's services: one pipeline and one backend per model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.rpc.channel import open_channel
from common.rpc.discovery import Discovery
from common.rpc.sessions import SessionsClient
from common.secrets import read_secret
from common.settings import BackendSettings
from gateway.backends import Backend, ServedModel
from gateway.pipeline.administration import GrpcAdministration
from gateway.pipeline.client import GrpcPipeline
from gateway.pipeline.model import GrpcModel
from gateway.pipeline.readiness import PipelineReadiness
from gateway.pipeline.scheduler_groups import SchedulerGroups
from protos.gen.pando.v1 import detokenizer_pb2_grpc, tokenizer_pb2_grpc

if TYPE_CHECKING:
    import grpc

    from common.rpc.discovery import Found
    from common.rpc.security import Security
    from common.settings import GatewaySettings
    from gateway.metrics import GatewayMetrics


class ModelServices:
    """Owns the channels to one model's services."""

    def __init__(
        self,
        name: str | None,
        settings: BackendSettings,
        metrics: GatewayMetrics,
        security: Security,
        admin_token: str | None = None,
    ) -> None:
        """Open the channels to the services of the model `name`, or of the only model if it is None."""
        self._tokenizer = open_channel(settings.tokenizer, security)
        self._detokenizer = open_channel(settings.detokenizer, security)
        self._schedulers = open_schedulers(settings, security)
        tokenizer = tokenizer_pb2_grpc.TokenizerStub(self._tokenizer)
        detokenizer = detokenizer_pb2_grpc.DetokenizerStub(self._detokenizer)
        model = GrpcModel(tokenizer, SessionsClient(self._tokenizer))
        served = ServedModel(model, name)
        self.pipeline = GrpcPipeline(
            tokenizer, detokenizer, metrics, on_tokenizer_connected=served.expire, model=name or ""
        )
        self.backend = Backend(
            served=served,
            model=model,
            readiness=PipelineReadiness(self.pipeline, self._tokenizer),
            administration=GrpcAdministration(self._schedulers, admin_token),
            name=name,
            aliases=settings.aliases,
        )

    async def close(self) -> None:
        await self._tokenizer.close()
        await self._detokenizer.close()
        await self._schedulers.close()


def open_models(
    settings: GatewaySettings, metrics: GatewayMetrics, security: Security
) -> dict[str | None, ModelServices]:
    """Return the services of all models by name; the key of a single unnamed model is None.

    Raises:
        ConfigurationError: the admin token's file is unreadable or empty.
    """
    token = read_admin_token(settings)
    only = BackendSettings(
        tokenizer=settings.tokenizer,
        detokenizer=settings.detokenizer,
        schedulers=settings.schedulers,
    )
    backends: list[tuple[str | None, BackendSettings]] = [*settings.models.items()] or [(None, only)]
    return {name: ModelServices(name, each, metrics, security, token) for name, each in backends}


def open_schedulers(settings: BackendSettings, security: Security) -> SchedulerGroups:
    """Return the scheduler groups that the administration endpoints reach; possibly none."""

    def connect(found: Found) -> grpc.aio.Channel:
        return open_channel(found.address, security, found.name)

    return SchedulerGroups(Discovery(settings.schedulers), connect)


def read_admin_token(settings: GatewaySettings) -> str | None:
    """Return the token that schedulers require of administrators, if configured.

    Raises:
        ConfigurationError: the token's file is unreadable or empty.
    """
    return read_secret("gateway.scheduler_admin_token", settings.scheduler_admin_token)
