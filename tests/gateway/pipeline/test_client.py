from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from common.errors import PandoError
from common.requests import ChatMessage, ChatPrompt, GenerateRequest, ImageFile
from common.rpc.peers import servers_at
from common.rpc.sessions import SessionsClient
from common.types import (
    Admission,
    ErrorCode,
    RequestFailure,
    RequestId,
    RequestOptions,
    SessionGrant,
    SessionWish,
    Subject,
    View,
)
from gateway.metrics import GatewayMetrics
from gateway.pipeline import client as client_module
from gateway.pipeline.client import GrpcPipeline
from gateway.pipeline.model import IMAGES_TIMEOUT_S, TIMEOUT_S, GrpcModel, PipelineReadiness
from protos.gen.pando.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tests.fakes.pipeline_servers import DETOKENIZER, TOKENIZER, FakeServices, pipeline_servers
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.deltas import Delta

ANN = Subject("acme", "user/ann")


@dataclass
class Notes:
    """A listener that writes down what it hears."""

    admissions: list[Admission] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    lost: list[tuple[RequestId, RequestFailure]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def on_admission(self, admission: Admission) -> None:
        self.admissions.append(admission)

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def on_lost(self, request_id: RequestId, failure: RequestFailure) -> None:
        self.lost.append((request_id, failure))


@dataclass
class Connected:
    pipeline: GrpcPipeline
    model: GrpcModel
    readiness: PipelineReadiness


@asynccontextmanager
async def connected(services: FakeServices) -> AsyncIterator[Connected]:
    tokenizers, detokenizers = servers_at([services.address(TOKENIZER)]), servers_at([services.address(DETOKENIZER)])
    pipeline = GrpcPipeline(tokenizers, detokenizers, GatewayMetrics(CollectorRegistry()))
    channel = pipeline.tokenizer_channel()
    model = GrpcModel(tokenizer_pb2_grpc.TokenizerStub(channel), SessionsClient(channel))
    running = asyncio.create_task(pipeline.run())
    try:
        yield Connected(pipeline, model, PipelineReadiness(pipeline))
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def request(name: str = "r1", n: int = 1) -> GenerateRequest:
    return GenerateRequest(RequestId(name), View(Subject("t", "u")), "tiny", "Hello", RequestOptions(n=n))


async def up(client: Connected) -> None:
    await until(lambda: client.pipeline.is_linked and client.pipeline.is_subscribed)


async def test_request_goes_out_and_text_comes_back(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        notes = Notes()
        client.pipeline.submit(request(n=2), notes)
        await until(lambda: len(notes.deltas) == 8 and notes.admissions)
    assert notes.admissions == [Admission(RequestId("r1"), 7)]
    assert [delta.text for delta in notes.deltas if delta.choice_index == 1] == list(services.words)
    assert notes.lost == []


async def test_a_request_too_large_for_a_message_is_refused_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_REQUEST_BYTES", 1000)
    large = replace(request("large"), prompt="x" * 2000)
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        refused, served = Notes(), Notes()
        client.pipeline.submit(large, refused)
        client.pipeline.submit(request("small"), served)
        await until(lambda: served.text == "".join(services.words) and bool(refused.admissions))
    [admission] = refused.admissions
    assert admission.rejected is not None
    assert admission.rejected.code is ErrorCode.INVALID_REQUEST
    assert "may have 1000" in admission.rejected.message
    assert refused.lost == served.lost == []


async def test_requests_queued_in_one_loop_iteration_are_sent_in_one_message(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        notes = Notes()
        for number in range(50):
            client.pipeline.submit(request(f"r{number}"), notes)
        await until(lambda: len(notes.deltas) == 200)
    assert services.batches == [50]


async def test_large_requests_are_split_into_several_messages(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        for number in range(3):
            large = request(f"r{number}")
            object.__setattr__(large, "prompt", "x" * 3_000_000)
            client.pipeline.submit(large, Notes())
        await services.until(lambda: len(services.requests) == 3)
    assert services.batches == [1, 1, 1]


async def test_nothing_follows_a_rejection(tmp_path: Path) -> None:
    rejection = common_pb2.RequestError(code=common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, message="too long")
    async with pipeline_servers(tmp_path, rejection=rejection) as services, connected(services) as client:
        await up(client)
        notes = Notes()
        client.pipeline.submit(request(), notes)
        await until(lambda: notes.admissions)
        rejected = notes.admissions[0].rejected
        assert rejected is not None
        assert rejected.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        await services.restart(TOKENIZER)
        await services.restart(DETOKENIZER)
        await up(client)
    assert notes.lost == []


async def test_abort_goes_out_once_by_exact_id(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path, automatic=1) as services, connected(services) as client:
        await up(client)
        notes = Notes()
        client.pipeline.submit(request("r1"), notes)
        client.pipeline.submit(request("r10"), notes)
        await until(lambda: len(notes.deltas) == 2)
        client.pipeline.abort(RequestId("r1"))
        client.pipeline.abort(RequestId("r1"))
        client.pipeline.abort(RequestId("nobody"))
        await services.until(lambda: services.aborts)
        services.release.set()
        await until(lambda: len(notes.deltas) == 5)
    assert services.aborts == ["r1"]
    assert {delta.request_id for delta in notes.deltas[2:]} == {"r10"}


async def test_an_abort_before_sending_sends_neither_request_nor_abort(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        client.pipeline.submit(request("r1"), Notes())
        client.pipeline.abort(RequestId("r1"))
        client.pipeline.submit(request("r2"), Notes())
        await services.until(lambda: services.requests)
    assert [one.request_id for one in services.requests] == ["r2"]
    assert services.aborts == []


async def test_finished_requests_are_not_aborted(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        notes = Notes()
        client.pipeline.submit(request("r1"), notes)
        await until(lambda: len(notes.deltas) == 4)
        client.pipeline.abort(RequestId("r1"))
        await asyncio.sleep(0.02)
    assert services.aborts == []


async def test_without_a_pipeline_a_request_is_lost_at_once(tmp_path: Path) -> None:
    services = FakeServices(tmp_path)
    async with connected(services) as client:
        notes = Notes()
        client.pipeline.submit(request(), notes)
        assert notes.lost == []  # never before submit returns
        await until(lambda: notes.lost)
    assert notes.lost[0][1].retryable
    assert notes.lost[0][1].code is ErrorCode.UNAVAILABLE


async def test_a_dead_tokenizer_loses_only_requests_that_it_had_not_admitted(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path, automatic=1) as services, connected(services) as client:
        await up(client)
        admitted, waiting = Notes(), Notes()
        client.pipeline.submit(request("admitted"), admitted)
        await until(lambda: admitted.deltas)
        services.admits = False
        client.pipeline.submit(request("waiting"), waiting)
        await services.until(lambda: len(services.requests) == 2)
        await services.kill(TOKENIZER)
        await until(lambda: waiting.lost)
        services.admits = True
        services.release.set()
        await until(lambda: admitted.text == "Hello world")
        await services.start(TOKENIZER)
        await up(client)
        # It may have reached the scheduler before the break.
        await services.until(lambda: services.aborts == ["waiting"])
        again = Notes()
        client.pipeline.submit(request("waiting.0.1"), again)
        await until(lambda: again.text == "Hello world")
    assert admitted.lost == []


async def test_a_dead_detokenizer_loses_all_requests_and_is_subscribed_again(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path, automatic=1) as services, connected(services) as client:
        await up(client)
        notes = Notes()
        client.pipeline.submit(request("r1"), notes)
        client.pipeline.submit(request("r2"), notes)
        await until(lambda: len(notes.deltas) == 2)
        await services.kill(DETOKENIZER)
        await until(lambda: len(notes.lost) == 2)
        await services.until(lambda: len(services.aborts) == 2)
        await services.start(DETOKENIZER)
        await up(client)
        services.release.set()
        again = Notes()
        client.pipeline.submit(request("r3"), again)
        await until(lambda: again.text == "Hello world")
    assert sorted(services.aborts) == ["r1", "r2"]
    assert len(set(services.subscribers)) == len(services.subscribers) == 2
    assert services.requests[-1].reply_to.subscriber_id == services.subscribers[-1]


@pytest.mark.parametrize(("admits", "service"), [(False, "tokenizer"), (True, "detokenizer")])
async def test_a_silent_request_that_its_service_does_not_know_is_lost(
    tmp_path: Path, *, admits: bool, service: str
) -> None:
    async with pipeline_servers(tmp_path, automatic=0, admits=admits) as services, connected(services) as client:
        await up(client)
        notes = Notes()
        client.pipeline.submit(request("lost"), notes)
        client.pipeline.submit(request("known"), notes)
        await services.until(lambda: len(services.requests) == 2)
        services.unknown.add("lost")
        await until(lambda: notes.lost)
        [(name, failure)] = notes.lost
        assert (name, failure.code, failure.retryable) == ("lost", ErrorCode.UNAVAILABLE, True)
        assert failure.message == f"the {service} does not know the request"
        # In case that it runs nevertheless.
        await services.until(lambda: services.aborts == ["lost"])


async def test_readiness_names_the_missing_services(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        assert await client.readiness.missing() == []
        await services.set_serving(TOKENIZER, False)
        assert await client.readiness.missing() == [
            "tokenizer: connected, but it cannot serve (is the scheduler or a worker away?)"
        ]
        await services.kill(TOKENIZER)
        await services.kill(DETOKENIZER)
        await until(lambda: not client.pipeline.is_linked and not client.pipeline.is_subscribed)
        assert await client.readiness.missing() == ["tokenizer: not connected", "detokenizer: not subscribed"]


async def test_chats_with_images_have_more_time_than_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ChatPrompt((ChatMessage("user", "yo"),))
    seen = ChatPrompt((ChatMessage("user", "", parts=("yo", ImageFile(b"clip", is_video_file=True))),))
    timeouts: list[float] = []
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        stub = client.model._stub
        ask = stub.RenderChat

        def noted(request: tokenizer_pb2.RenderChatRequest, timeout: float) -> object:
            timeouts.append(timeout)
            return ask(request, timeout=timeout)

        monkeypatch.setattr(stub, "RenderChat", noted)
        for chat in (plain, seen):
            await client.model.render_chat(ANN, chat)
    assert timeouts == [TIMEOUT_S, IMAGES_TIMEOUT_S]
    assert timeouts[1] > 300, "the most that an image may take at a tokenizer"


async def test_questions_to_the_tokenizer(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        card = await client.model.get_model()
        assert (card.name, card.max_context_tokens, card.created_unix_s) == ("tiny", 2048, 5)
        assert (await client.model.tokenize(ANN, "hi", add_special_tokens=True)).tokens == ("h", "i")
        assert await client.model.detokenize(ANN, (104, 105), skip_special_tokens=True) == "hi"
        chat = ChatPrompt((ChatMessage("user", "yo"),))
        assert (await client.model.render_chat(ANN, chat)).ids == (121, 111)
        with pytest.raises(PandoError, match="666") as refused:
            await client.model.detokenize(ANN, (666,), skip_special_tokens=True)
        assert refused.value.code is ErrorCode.INVALID_REQUEST
        assert refused.value.param == "tokens"
        await services.kill(TOKENIZER)
        with pytest.raises(PandoError) as away:
            await client.model.get_model()
        assert away.value.code is ErrorCode.UNAVAILABLE


async def test_sessions_are_opened_and_closed_and_refusals_come_back(tmp_path: Path) -> None:
    async with pipeline_servers(tmp_path) as services, connected(services) as client:
        await up(client)
        ann, bob = View(Subject("acme", "ann")), View(Subject("acme", "bob"))
        wish = SessionWish(ann, "chat", capacity_tokens=64, timeout_ms=500)
        assert await client.model.open_session(wish) == SessionGrant(64, 1000)
        assert services.sessions == {"ann/chat": wish}
        with pytest.raises(PandoError, match="one session of this user is open") as refused:
            await client.model.open_session(wish)
        assert (refused.value.code, refused.value.param) == (ErrorCode.QUEUE_FULL, "session_id")
        assert not await client.model.close_session(bob, "chat")
        assert await client.model.close_session(ann, "chat")
