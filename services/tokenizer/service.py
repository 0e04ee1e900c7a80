"""The gRPC servicer of the tokenizer.

`Submit` uses `context.write` instead of yielding: a generator that is abandoned in a `yield` runs its `finally` only
when it is garbage-collected, but a gateway's requests must be released as soon as its stream breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import numpy as np

from common.errors import PandoError, UnavailableError
from common.rpc.stream import MessageNumbers, accept_stream
from common.types import RequestId, Subject
from common.wire.answers import divided
from common.wire.identity import subject_from_wire
from common.wire.requests import pooling_to_wire
from protos.gen.pando.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer import metrics
from services.tokenizer.limits import check_count, check_ids, check_images, param_of
from services.tokenizer.relay import GatewaySession
from services.tokenizer.wire import (
    admissions_to_wire,
    chat_from_wire,
    head_to_wire,
    image_limits_to_wire,
    reasoning_style_to_wire,
    submission_from_wire,
    tool_style_to_wire,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from common.room import SharedRoom
    from common.types import Admission
    from services.tokenizer.encoding_pool import EncodingPool
    from services.tokenizer.images.prompts import ImagePrompts
    from services.tokenizer.limits import ModelLimits
    from services.tokenizer.relay import Relay

# Admissions that may wait for a gateway that does not read its stream.
MAX_OWED = 65_536
# The subject of calls that do not come from a gateway. No credential has an empty tenant name.
OPERATORS = Subject("", "operators")

# The types of requests and responses differ by method.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TokenizerService(tokenizer_pb2_grpc.TokenizerServicer):
    """Decodes messages, calls the relay or the pool, and encodes the results."""

    def __init__(
        self,
        relay: Relay,
        pool: EncodingPool,
        images: ImagePrompts,
        room: SharedRoom,
        limits: ModelLimits,
        created_unix_s: int,
    ) -> None:
        """Serve the model named in `limits`, loaded at `created_unix_s` (Unix time); calls occupy places in `room`."""
        self._images = images
        self._relay = relay
        self._pool = pool
        self._room = room
        self._limits = limits
        self._created_unix_s = created_unix_s

    async def Submit(  # type: ignore[override]  # noqa: N802  (writes to its context; the contract names it)
        self, request_iterator: AsyncIterator[tokenizer_pb2.TokenizerSubmitRequest], context: Context
    ) -> None:
        """Accept a gateway's requests and aborts; send admissions."""
        await accept_stream(context, is_numbered=True)
        session = GatewaySession()
        writer = asyncio.create_task(_answer(session, context))
        numbers = MessageNumbers()
        try:
            async for message in request_iterator:
                numbers.check(message.sequence)
                if message.heartbeat:
                    session.confirm()
                self._take_in(session, message)
                if session.owes > MAX_OWED:
                    raise UnavailableError("the gateway does not read its admissions")
                metrics.PENDING_REQUESTS.set(self._relay.pending)
        finally:
            writer.cancel()
            self._relay.close(session)
            metrics.PENDING_REQUESTS.set(self._relay.pending)

    async def FindUnadmitted(  # noqa: N802
        self, request: tokenizer_pb2.FindUnadmittedRequest, context: Context
    ) -> tokenizer_pb2.FindUnadmittedResponse:
        """Return those of the requests that do not wait for their admission."""
        unknown = [name for name in request.request_ids if not self._relay.is_pending(RequestId(name))]
        return tokenizer_pb2.FindUnadmittedResponse(request_ids=unknown)

    def _take_in(self, session: GatewaySession, message: tokenizer_pb2.TokenizerSubmitRequest) -> None:
        submissions = []
        for generate in message.generates:
            try:
                submissions.append(submission_from_wire(generate))
            except PandoError as error:
                self._relay.reject(session, RequestId(generate.request_id), error)
        metrics.REQUESTS_TOTAL.inc(len(message.generates))
        self._relay.submit(session, submissions)
        if message.aborts:
            self._relay.abort([RequestId(abort.request_id) for abort in message.aborts])

    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        with self._placed(request) as subject:
            special = request.add_special_tokens
            ids, tokens = await self._pool.tokenize(subject, request.text, add_special_tokens=special)
        limit = self._limits.max_context_tokens
        return tokenizer_pb2.TokenizeResponse(ids=ids, tokens=tokens, max_context_tokens=limit)

    async def Detokenize(  # noqa: N802
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        """Decode ids of the vocabulary, at most as many as the model's context has."""
        check_count(len(request.ids), self._limits, "tokens")
        check_ids((max(request.ids, default=0),), self._limits, "tokens")
        with self._placed(request) as subject:
            skip = request.skip_special_tokens
            text = await self._pool.detokenize(subject, list(request.ids), skip_special_tokens=skip)
        return tokenizer_pb2.DetokenizeResponse(text=text)

    async def RenderChat(  # noqa: N802
        self, request: tokenizer_pb2.RenderChatRequest, context: Context
    ) -> tokenizer_pb2.RenderChatResponse:
        """Return the rendered prompt of a conversation, as text and ids."""
        chat = chat_from_wire(request.chat)
        images = chat.images
        check_images(images, self._limits, "messages")
        with self._placed(request) as subject:
            text, ids = await self._pool.render(subject, chat)
            if images:
                encoded = np.array(ids, dtype=np.int32)
                placed = await self._images.place(subject, encoded, images, param_of(chat))
                ids = self._images.shown(placed.token_ids).tolist()
        return tokenizer_pb2.RenderChatResponse(text=text, ids=ids)

    @contextlib.contextmanager
    def _placed(
        self,
        request: tokenizer_pb2.TokenizeRequest | tokenizer_pb2.DetokenizeRequest | tokenizer_pb2.RenderChatRequest,
    ) -> Iterator[Subject]:
        """Occupy a place of the call's subject; calls without a subject count as OPERATORS."""
        subject = subject_from_wire(request.subject) if request.HasField("subject") else OPERATORS
        self._room.take(subject)
        try:
            yield subject
        finally:
            self._room.give_back(subject)

    async def GetModel(  # noqa: N802
        self, request: tokenizer_pb2.GetModelRequest, context: Context
    ) -> tokenizer_pb2.GetModelResponse:
        """Return the served model's card."""
        style, embedding = self._pool.encoder.style, self._limits.embedding
        return tokenizer_pb2.GetModelResponse(
            model=self._limits.model,
            max_context_tokens=self._limits.max_context_tokens,
            vocabulary_size=self._limits.vocabulary_size,
            has_chat_template=self._pool.encoder.has_chat_template,
            created_unix_s=self._created_unix_s,
            tool_style=tool_style_to_wire(style.tools),
            has_reasoning=style.reasoning is not None,
            begins_with_reasoning=style.begins_with_reasoning,
            is_encoder=embedding.is_encoder,
            pooling=pooling_to_wire(embedding.pooling),
            embedding_dimensions=embedding.dimensions,
            reasoning_style=reasoning_style_to_wire(style.reasoning),
            begins_with_reasoning_on_request=style.begins_with_reasoning_on_request,
            begins_with_reasoning_although_off=style.begins_with_reasoning_although_off,
            reads_reasoning_effort=style.reads_reasoning_effort,
            tools_problem=style.tools_problem,
            only_embeds=embedding.only_embeds,
            head=head_to_wire(embedding.head),
            prompts=[tokenizer_pb2.NamedPrompt(name=name, text=text) for name, text in embedding.prompts.items()],
            default_prompt=embedding.default_prompt,
            images=image_limits_to_wire(self._limits.images),
        )


async def _answer(session: GatewaySession, context: Context) -> None:
    # An error here means that the stream has broken; the reading side of the stream handles that.
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        numbers = count(1)
        while True:
            admissions = await session.take()
            for admission in admissions:
                _count(admission)
            for part in divided(admissions):
                response = admissions_to_wire(part)
                response.sequence = next(numbers)
                await context.write(response)


def _count(admission: Admission) -> None:
    if admission.rejected is not None:
        metrics.REJECTIONS_TOTAL.labels(admission.rejected.code.value).inc()
    else:
        metrics.PROMPT_TOKENS.observe(admission.prompt_tokens)
