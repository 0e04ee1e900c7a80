"""A gateway over fakes, as tests use it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client import CollectorRegistry

from common.audit.log import NoAudit
from common.settings import GatewaySettings
from gateway.app import create_app
from gateway.assembly import MAX_OPEN_BATCHES, build_files, build_identity, build_images, build_quotas, limits
from gateway.backends import Backend, Backends, ServedModel
from gateway.batches.batches import Batches
from gateway.delivery.answer_context import AnswerContext
from gateway.endpoints.context import Context
from gateway.generation.generations import Generations
from gateway.generation.journal import Journal, ResumePolicy
from gateway.ledger.entries import DAY_S
from gateway.ledger.ledger import Ledger
from gateway.ledger.sqlite_store import SqliteLedger
from gateway.metrics import GatewayMetrics
from gateway.state.state import open_state
from tests.fakes.pipeline import FakeAdministration, FakeModel, FakePipeline, FakeReadiness, Script, says

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fastapi import FastAPI

    from common.audit.log import Audit

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class FakedGateway:
    """An application over a fake pipeline."""

    pipeline: FakePipeline
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    model: FakeModel = field(default_factory=FakeModel)
    readiness: FakeReadiness = field(default_factory=FakeReadiness)
    administration: FakeAdministration = field(default_factory=FakeAdministration)
    journal: Journal = field(default_factory=Journal)
    peer: str = "127.0.0.1"
    name: str | None = None
    aliases: tuple[str, ...] = ()
    others: list[Backend] = field(default_factory=list)
    limits_file: Path | None = None
    resume: ResumePolicy = field(default_factory=ResumePolicy)
    audit: Audit = field(default_factory=NoAudit)
    # Changes of `Limits`.
    bounds: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.generations = Generations(
            self.pipeline, self.journal, self.resume, self.metrics, max_open_requests=self.settings.max_open_requests,
            open_image_bytes=self.settings.images.open_bytes,
        )  # fmt: skip
        self.state = open_state(self.settings, self.generations, self.metrics)
        quotas = build_quotas(self.limits_file, self.state, self.audit)
        files = build_files(self.settings.batches, self.state.documents)
        self.context = Context(
            generations=self.generations,
            models=Backends([self.backend, *self.others], self.settings.default_model, self.settings.adapter_aliases),
            identity=build_identity(self.settings, self.audit),
            quotas=quotas,
            answers=AnswerContext(self.generations, self.state.records, quotas, self.state.ledger),
            stored=self.state.stored,
            files=files,
            images=build_images(self.settings.images, files),
            batches=Batches(self.state.documents, MAX_OPEN_BATCHES),
            aborts=self.state.aborts,
            ledger=self.state.ledger,
            audit=self.audit,
            metrics=self.metrics,
            limits=replace(limits(self.settings), **self.bounds),
            fingerprint="pando-test",
        )
        self.app: FastAPI = create_app(self.context, self.settings.cors_origins, self.settings.console)

    @property
    def backend(self) -> Backend:
        return Backend(
            ServedModel(self.model, self.name), self.model, self.readiness, self.administration, self.name, self.aliases
        )

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, client=(self.peer, 50000))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO, **fields})

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "Hello", **fields})

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body, headers=headers)

    async def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path, headers=headers)


def memory_ledger() -> Ledger:
    return Ledger(SqliteLedger(None, 400 * DAY_S), GatewayMetrics(CollectorRegistry()))


def gateway_saying(*words: str, **settings: Any) -> FakedGateway:
    return faked(says(*words), **settings)


def faked(
    script: Script | None, limits_file: Path | None = None, bounds: dict[str, Any] | None = None, **settings: Any
) -> FakedGateway:
    gateway = GatewaySettings(**settings)
    return FakedGateway(FakePipeline(script), gateway, limits_file=limits_file, bounds=bounds or {})


def stable(text: str) -> str:
    """Replace what differs from run to run."""
    text = re.sub(r"(chatcmpl|cmpl)-[0-9a-f]{32}", r"\1-ID", text)
    text = re.sub(r"^(id: \S+/\d+)\.[0-9a-f]{8}$", r"\1.CHECK", text, flags=re.MULTILINE)
    return re.sub(r'"created":\d+', '"created":0', text)


def events(text: str) -> Iterable[str]:
    """The data of each server-sent event, with or without an id; comments keep slow streams alive."""
    assert text.endswith("\n\n")
    for block in re.sub(r"^:.*\n+", "", text, flags=re.MULTILINE).removesuffix("\n\n").split("\n\n"):
        event = re.sub(r"^id: \S+\n", "", block)
        assert event.startswith("data: "), event
        yield event.removeprefix("data: ")


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check what every error has in common, and return it."""
    assert response.status_code == status, response.text
    body = response.json()
    if isinstance(body["error"], str):
        # Text Embeddings Inference has a text and its type.
        assert body.keys() == {"error", "error_type"}
        return {"message": body["error"], "type": body["error_type"], "param": None, "code": None}
    # Anthropic's clients look for a type beside it, and Cohere's for a message.
    assert body.keys() - {"type", "message"} == {"error"}
    assert body.get("message", body["error"]["message"]) == body["error"]["message"]
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    return dict(body["error"])
