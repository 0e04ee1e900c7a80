"""A tokenizer and a detokenizer that speak the real protocol and compute nothing, for tests of the gateway.

Every request is answered with one token per word of `words`; a resumed one continues after the tokens it names.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import InvalidRequestError, QueueFullError
from common.rpc.server import RpcServer
from common.rpc.sessions import SessionsService
from common.types import SessionGrant
from protos.gen.pando.v1 import (
    common_pb2,
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    sessions_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    from common.types import SessionWish, View

TOKENIZER = "pando.v1.Tokenizer"
DETOKENIZER = "pando.v1.Detokenizer"


@dataclass
class FakeServices:
    """What both servers share, and what a test may look at or change."""

    directory: Path
    words: tuple[str, ...] = ("Hel", "lo", " wor", "ld")
    # Tokens of each choice that come by themselves; the rest waits for `release`.
    automatic: int = 1_000_000
    admits: bool = True
    rejection: common_pb2.RequestError | None = None
    # Whether images are said to be kept, and whether requests that name one by its key are refused as not kept.
    keeps_images: bool = False
    lacks_images: bool = False
    # Whether all requests with images are refused so, those with files included.
    lacks_all_images: bool = False
    requests: list[tokenizer_pb2.GenerateRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    # Requests that the services deny to know.
    unknown: set[str] = field(default_factory=set)
    batches: list[int] = field(default_factory=list)
    subscribers: list[str] = field(default_factory=list)
    sessions: dict[str, SessionWish] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.release = asyncio.Event()
        self._changed = asyncio.Condition()
        self._mailboxes: dict[str, asyncio.Queue[list[detokenizer_pb2.Delta]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: dict[str, RpcServer] = {}

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        name = f"{wish.view.subject.name}/{wish.session}"
        if name in self.sessions:
            raise QueueFullError("one session of this user is open", param="session_id", retry_after_ms=1000)
        self.sessions[name] = wish
        return SessionGrant(wish.capacity_tokens or 96, 1000)

    async def close_session(self, view: View, session: str) -> bool:
        return self.sessions.pop(f"{view.subject.name}/{session}", None) is not None

    async def find_session(self, view: View, session: str, after: str | None = None) -> bool:
        raise AssertionError("gateways do not search")

    def address(self, service: str) -> str:
        return f"unix:{self.directory}/{service}.sock"

    async def start(self, service: str) -> None:
        server = RpcServer(service, self.address(service))
        if service == TOKENIZER:
            server.add(tokenizer_pb2_grpc.add_TokenizerServicer_to_server, FakeTokenizer(self))
            server.add(sessions_pb2_grpc.add_SessionsServicer_to_server, SessionsService(self))
        else:
            server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, FakeDetokenizer(self))
        await server.start()
        await server.set_serving(True)
        self._servers[service] = server

    async def set_serving(self, service: str, serving: bool) -> None:
        await self._servers[service].set_serving(serving)

    async def kill(self, service: str) -> None:
        await self._servers.pop(service).stop(0)

    async def restart(self, service: str) -> None:
        await self.kill(service)
        await self.start(service)

    async def stop(self) -> None:
        self.release.set()
        for service in list(self._servers):
            await self.kill(service)

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` holds; it is asked again whenever something arrives."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(condition)

    async def arrived(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def find_unknown(self, request_ids: Iterable[str]) -> set[str]:
        return self.unknown.intersection(request_ids)

    def begin(self, request: tokenizer_pb2.GenerateRequest) -> None:
        task = asyncio.create_task(self._generate(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def open_mailbox(self, subscriber_id: str) -> asyncio.Queue[list[detokenizer_pb2.Delta]]:
        self.subscribers.append(subscriber_id)
        return self._mailboxes.setdefault(subscriber_id, asyncio.Queue())

    def close_mailbox(self, subscriber_id: str) -> None:
        self._mailboxes.pop(subscriber_id, None)

    async def _generate(self, request: tokenizer_pb2.GenerateRequest) -> None:
        first = len(request.resume.token_ids)
        for number in range(first, len(self.words)):
            if number >= self.automatic:
                await self.release.wait()
            mailbox = self._mailboxes.get(request.reply_to.subscriber_id)
            if mailbox is None:
                return  # the subscriber is away: the scheduler would abort
            mailbox.put_nowait(list(self._deltas(request, first, number)))
            await asyncio.sleep(0)

    def _deltas(
        self, request: tokenizer_pb2.GenerateRequest, first: int, number: int
    ) -> Iterator[detokenizer_pb2.Delta]:
        for choice in range(request.n):
            delta = detokenizer_pb2.Delta(
                request_id=request.request_id,
                choice_index=choice,
                first_token_index=number,
                token_ids=[number],
                text=self.words[number],
            )
            if number == first:
                delta.prompt_usage.CopyFrom(detokenizer_pb2.PromptUsage(prompt_tokens=7, cached_tokens=4))
            if number == len(self.words) - 1:
                delta.finish.reason = common_pb2.FINISH_REASON_STOP
            yield delta


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """Admits requests and has them answered."""

    def __init__(self, services: FakeServices) -> None:
        self._services = services

    async def Submit(
        self, request_iterator: AsyncIterator[tokenizer_pb2.TokenizerSubmitRequest], context: Any
    ) -> AsyncIterator[tokenizer_pb2.TokenizerSubmitResponse]:
        services = self._services
        async for message in request_iterator:
            if message.generates:
                services.batches.append(len(message.generates))
            services.requests.extend(message.generates)
            services.aborts.extend(abort.request_id for abort in message.aborts)
            await services.arrived()
            if services.admits and message.generates:
                yield tokenizer_pb2.TokenizerSubmitResponse(admissions=[self._admit(one) for one in message.generates])

    def _admit(self, request: tokenizer_pb2.GenerateRequest) -> common_pb2.Admission:
        services, rejection = self._services, self._services.rejection
        lacks_images = services.lacks_images and any(image.key for image in request.images)
        lacks_images = lacks_images or (services.lacks_all_images and bool(request.images))
        if lacks_images:
            rejection = common_pb2.RequestError(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="not kept")
        if rejection is None:
            services.begin(request)
        return common_pb2.Admission(
            request_id=request.request_id,
            prompt_tokens=7,
            rejected=rejection,
            lacks_images=lacks_images,
            keeps_images=services.keeps_images and rejection is None,
        )

    async def FindUnadmitted(
        self, request: tokenizer_pb2.FindUnadmittedRequest, context: Any
    ) -> tokenizer_pb2.FindUnadmittedResponse:
        return tokenizer_pb2.FindUnadmittedResponse(request_ids=self._services.find_unknown(request.request_ids))

    async def GetModel(self, request: Any, context: Any) -> tokenizer_pb2.GetModelResponse:
        return tokenizer_pb2.GetModelResponse(
            model="tiny", max_context_tokens=2048, vocabulary_size=100, has_chat_template=True, created_unix_s=5
        )

    async def Tokenize(self, request: tokenizer_pb2.TokenizeRequest, context: Any) -> tokenizer_pb2.TokenizeResponse:
        return tokenizer_pb2.TokenizeResponse(ids=map(ord, request.text), tokens=list(request.text))

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Any
    ) -> tokenizer_pb2.DetokenizeResponse:
        if 666 in request.ids:
            raise InvalidRequestError("token id 666 is not in the vocabulary", param="tokens")
        return tokenizer_pb2.DetokenizeResponse(text="".join(map(chr, request.ids)))

    async def RenderChat(
        self, request: tokenizer_pb2.RenderChatRequest, context: Any
    ) -> tokenizer_pb2.RenderChatResponse:
        text = "".join(message.content for message in request.chat.messages)
        return tokenizer_pb2.RenderChatResponse(text=text, ids=map(ord, text))


class FakeDetokenizer(detokenizer_pb2_grpc.DetokenizerServicer):
    """Carries deltas to subscribers."""

    def __init__(self, services: FakeServices) -> None:
        self._services = services

    async def Push(
        self, request_iterator: AsyncIterator[detokenizer_pb2.PushRequest], context: Any
    ) -> AsyncIterator[detokenizer_pb2.PushResponse]:
        async for _ in request_iterator:  # there is no scheduler that could push
            yield detokenizer_pb2.PushResponse()

    async def FindUnknown(
        self, request: detokenizer_pb2.FindUnknownRequest, context: Any
    ) -> detokenizer_pb2.FindUnknownResponse:
        return detokenizer_pb2.FindUnknownResponse(request_ids=self._services.find_unknown(request.request_ids))

    async def Subscribe(
        self, request: detokenizer_pb2.SubscribeRequest, context: Any
    ) -> AsyncIterator[detokenizer_pb2.SubscribeResponse]:
        mailbox = self._services.open_mailbox(request.subscriber_id)
        try:
            while True:
                yield detokenizer_pb2.SubscribeResponse(deltas=await mailbox.get())
        finally:
            self._services.close_mailbox(request.subscriber_id)


@asynccontextmanager
async def pipeline_servers(directory: Path, **options: Any) -> AsyncIterator[FakeServices]:
    """Run both servers on unix sockets in `directory`."""
    services = FakeServices(directory, **options)
    await services.start(TOKENIZER)
    await services.start(DETOKENIZER)
    try:
        yield services
    finally:
        await services.stop()
