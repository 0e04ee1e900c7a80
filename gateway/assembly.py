"""The objects of a gateway process, built from its settings, and the clients of each served model's services."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.audit.log import open_audit
from common.errors import ConfigurationError
from common.limits import Limits, changes, load_limits
from common.metric_names import exposed
from common.reloading import Reloading
from common.rpc.peers import servers_at
from common.rpc.security import UNIX_ONLY
from common.rpc.sessions import SessionsClient
from common.section import read_secret
from common.settings import BackendSettings
from common.version import version
from gateway.app import create_app, create_probe_app
from gateway.backends import Backend, Backends, ModelPipelines, ServedModel
from gateway.batches.batches import Batches
from gateway.batches.contents import DocumentContents
from gateway.batches.files import FileBounds, Files
from gateway.batches.object_contents import ObjectContents
from gateway.batches.runner import BatchRunner, LineBounds
from gateway.console.self_attack import SelfAttack, SelfAttackMetrics
from gateway.delivery.answer_context import AnswerContext
from gateway.endpoints.context import ClientLimits, Context
from gateway.endpoints.responses.route import adopt_responses
from gateway.generation.generations import Generations
from gateway.generation.journal import Journal, ResumePolicy
from gateway.identity.identity import Identity, Keyless
from gateway.identity.keys import KeyRing, key_changes, load_keys
from gateway.identity.peers import TrustedProxy, parse_networks
from gateway.identity.tokens import SignedTokens, TokenRules, open_signing_keys
from gateway.images.images import Images, NoFetcher
from gateway.images.remote import RemoteImages, UrlRules
from gateway.ledger.entries import DAY_S
from gateway.metrics import GatewayMetrics
from gateway.pipeline.administration import GrpcAdministration, SchedulerGroups
from gateway.pipeline.client import GrpcPipeline
from gateway.pipeline.model import GrpcModel, PipelineReadiness
from gateway.quotas.quotas import Quotas
from gateway.server.http_server import HttpServer, ProbeServer, https_files
from gateway.state.state import open_state
from protos.gen.pando.v1 import tokenizer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from common.audit.log import Audit
    from common.rpc.security import Security
    from common.settings import BatchesSettings, GatewaySettings, ImagesSettings, Settings
    from gateway.batches.documents import Documents
    from gateway.identity.keys import ApiKey
    from gateway.state.state import State


# Tenant of all callers whose credentials name none.
DEFAULT_TENANT = "default"
# Unfinished batches of one owner.
MAX_OPEN_BATCHES = 64


class Gateway:
    """One gateway process. It must be constructed on the event loop that runs it."""

    def __init__(
        self,
        of_services: Settings,
        registry: CollectorRegistry,
        security: Security = UNIX_ONLY,
        limits_clock: Callable[[], float] | None = None,
        resume: ResumePolicy | None = None,
    ) -> None:
        """Build all parts and open the listening socket. Tests pass `limits_clock` (seconds) and `resume`.

        Raises:
            ConfigurationError: the keys file, a network, a certificate or an address is wrong.
        """
        self._settings = settings = of_services.gateway
        self._audit = open_audit(of_services.audit, "gateway")
        identity = build_identity(settings, self._audit)
        metrics = GatewayMetrics(registry, exposed(registry, of_services))
        token = read_secret("scheduler.admin_token", of_services.scheduler.admin_token)
        self._services = open_models(settings, metrics, security, token)
        served = [each.backend for each in self._services.values()]
        backends = Backends(served, settings.default_model, settings.adapter_aliases)
        pipeline = ModelPipelines({name: each.pipeline for name, each in self._services.items() if name is not None})
        self._generations = Generations(
            self._services[None].pipeline if None in self._services else pipeline,
            Journal(),
            resume or ResumePolicy(),
            metrics,
            max_open_requests=settings.max_open_requests,
            open_image_bytes=settings.images.open_bytes,
        )
        self._state = open_state(settings, self._generations, metrics, limits_clock)
        quotas = build_quotas(of_services.limits.file, self._state, self._audit)
        self._answers = AnswerContext(self._generations, self._state.records, quotas, self._state.ledger)
        files = build_files(settings.batches, self._state.documents)
        self._context = context = Context(
            generations=self._generations,
            models=backends,
            identity=identity,
            quotas=quotas,
            stored=self._state.stored,
            files=files,
            images=build_images(settings.images, files),
            batches=Batches(self._state.documents, MAX_OPEN_BATCHES),
            answers=self._answers,
            aborts=self._state.aborts,
            ledger=self._state.ledger,
            audit=self._audit,
            metrics=metrics,
            limits=limits(settings),
            fingerprint=fingerprint(),
        )
        https = https_files(settings.tls)
        registry.register(SelfAttackMetrics(SelfAttack(settings.console.attack_report)))
        app = create_app(context, settings.cors_origins, settings.console)
        self._batches = build_runner(app, context, settings)
        self._server = HttpServer(app, settings.host, settings.port, https)
        asks_for_certificates = https is not None and https.clients is not None
        self._probes = (
            ProbeServer(create_probe_app(context), settings.host, security.probe_port)
            if asks_for_certificates and security.probe_port is not None
            else None
        )

    @property
    def port(self) -> int:
        """The TCP port on which the gateway listens."""
        return self._server.port

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set and all open requests have ended or `drain_s` has passed."""
        settings = self._settings
        pipelines = [each.pipeline.run() for each in self._services.values()]
        probes = [self._probes.run()] if self._probes else []
        state = [work() for work in self._state.background]
        answers = (self._answers.run(), self._answers.keep_ledger(), adopt_responses(self._context))
        batches = self._batches.run(stopping)
        background = (batches, *pipelines, *probes, *state, *answers, self._generations.watch_silence())
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(work) for work in background]
                await self._server.serve(stopping, self._generations, settings.drain_s)
                await self._answers.close()
                for task in running:
                    task.cancel()
        finally:
            await self._context.images.close()
            await self._context.files.close()
            await self._state.close()
            for each in self._services.values():
                await each.close()
            self._audit.close()


def fingerprint() -> str:
    """Return the `system_fingerprint` of responses; it changes with the server's version."""
    return f"pando-{version()}"


def build_identity(settings: GatewaySettings, audit: Audit) -> Identity:
    """Build the authentication of requests: by API keys, signed tokens, trusted proxies, or without credentials.

    `audit` records changes of the keys file.

    Raises:
        ConfigurationError: the keys file, a network or a setting for tokens is wrong.
    """
    keys = ReloadedKeys(settings.keys_file, audit) if settings.keys_file else None
    networks = parse_networks(settings.trusted_proxies)
    proxy = TrustedProxy(networks, settings.tenant_header, settings.user_header)
    keyless = Keyless(DEFAULT_TENANT, settings.anonymous, frozenset(settings.allowed_hosts))
    return Identity(keys, proxy, keyless, _build_tokens(settings))


def build_quotas(limits_file: Path | None, state: State, audit: Audit) -> Quotas:
    """Return the quotas of tenants and users, none without a file; `state` counts their use.

    `audit` records changes of the file.

    Raises:
        ConfigurationError: the limits file is wrong.
    """

    def note(before: Limits, after: Limits) -> None:
        audit.note("limits.changed", changes(before, after))

    rules = Reloading(limits_file, load_limits, on_change=note) if limits_file else None
    return Quotas(rules, state.meters, state.ledger)


def build_files(settings: BatchesSettings, documents: Documents) -> Files:
    """Return the files that clients upload and batches write.

    Raises:
        ConfigurationError: the object store's protocol is unknown, or its library is not installed.
    """
    store = settings.object_store
    contents = DocumentContents(documents) if store is None else ObjectContents(store)
    bounds = FileBounds(settings.max_file_bytes, settings.max_bytes, settings.lifetime_days * DAY_S)
    return Files(documents, contents, bounds)


def build_images(settings: ImagesSettings, files: Files) -> Images:
    """Return the part that reads the images of requests."""
    rules = UrlRules(settings.urls, settings.allow_http, settings.url_timeout_s)
    return Images(files, RemoteImages(rules) if settings.urls else NoFetcher(), settings.max_total_bytes)


def build_runner(app: ASGIApp, context: Context, settings: GatewaySettings) -> BatchRunner:
    """Return the part that runs the lines of batches as requests to `app`."""
    batches = settings.batches
    bounds = LineBounds(batches.lines_at_once, batches.max_lines, settings.max_body_bytes)
    return BatchRunner(app, context.batches, context.files, bounds)


class ReloadedKeys:
    """Implements `gateway.identity.identity.KeySource` with a file that is reloaded when it changes."""

    def __init__(self, path: Path, audit: Audit) -> None:
        def note(before: KeyRing, after: KeyRing) -> None:
            audit.note("keys.changed", key_changes(before, after))

        self._file = Reloading(path, lambda path: KeyRing(load_keys(path, may_be_empty=True)), on_change=note)
        audit.note("keys.loaded", {"ids": [key.id for key in self._file.value.all]})

    def find(self, secret: str) -> ApiKey | None:
        return self._file.value.find(secret)


def _build_tokens(settings: GatewaySettings) -> SignedTokens | None:
    if settings.jwt.keys is None:
        return None
    if settings.jwt.issuer is None or settings.jwt.audience is None:
        raise ConfigurationError("gateway.jwt.keys needs gateway.jwt.issuer and gateway.jwt.audience")
    rules = TokenRules(
        issuer=settings.jwt.issuer,
        audience=settings.jwt.audience,
        default_tenant=DEFAULT_TENANT,
        tenant_claim=settings.jwt.tenant_claim,
        user_claim=settings.jwt.user_claim,
        admin_scope=settings.jwt.admin_scope,
    )
    return SignedTokens(rules, open_signing_keys(settings.jwt.keys))


def limits(settings: GatewaySettings) -> ClientLimits:
    """Return the bounds on the memory and time that one client can use."""
    timeout_s = settings.request_timeout_s
    return ClientLimits(
        body_bytes=settings.max_body_bytes,
        request_timeout_ms=None if timeout_s is None else round(timeout_s * 1000),
        max_priority=settings.max_priority,
    )


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
        self._schedulers = open_schedulers(settings, security)
        self.pipeline = GrpcPipeline(
            servers_at(settings.tokenizer, security),
            servers_at(settings.detokenizer, security),
            metrics,
            on_tokenizer_connected=lambda: served.expire(),
            model=name or "",
        )
        channel = self.pipeline.tokenizer_channel()
        model = GrpcModel(tokenizer_pb2_grpc.TokenizerStub(channel), SessionsClient(channel))
        served = ServedModel(model, name)
        self.backend = Backend(
            served=served,
            model=model,
            readiness=PipelineReadiness(self.pipeline),
            administration=GrpcAdministration(self._schedulers, admin_token),
            name=name,
            aliases=settings.aliases,
        )

    async def close(self) -> None:
        await self._schedulers.close()


def open_models(
    settings: GatewaySettings, metrics: GatewayMetrics, security: Security, admin_token: str | None
) -> dict[str | None, ModelServices]:
    """Return the services of all models by name; the key of a single unnamed model is None."""
    only = BackendSettings(
        tokenizer=settings.tokenizer,
        detokenizer=settings.detokenizer,
        schedulers=settings.schedulers,
    )
    backends: list[tuple[str | None, BackendSettings]] = [*settings.models.items()] or [(None, only)]
    return {name: ModelServices(name, each, metrics, security, admin_token) for name, each in backends}


def open_schedulers(settings: BackendSettings, security: Security) -> SchedulerGroups:
    """Return the scheduler groups that the administration endpoints reach; possibly none."""
    return SchedulerGroups(servers_at(settings.schedulers, security))
