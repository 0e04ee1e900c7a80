"""Calls about the served model, answered by any of its tokenizers, and the readiness of its services."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.rpc.status import answered
from common.wire.identity import subject_to_wire
from gateway.pipeline.port import Tokenization
from gateway.pipeline.wire import chat_to_wire, model_from_wire
from protos.gen.pando.v1 import tokenizer_pb2

if TYPE_CHECKING:
    from common.requests import ChatPrompt
    from common.rpc.sessions import SessionHost
    from common.types import SessionGrant, SessionWish, Subject, View
    from gateway.pipeline.client import GrpcPipeline
    from gateway.pipeline.port import ModelInfo
    from protos.gen.pando.v1 import tokenizer_pb2_grpc

TIMEOUT_S = 10.0
CARD_TIMEOUT_S = 2.0
# For a chat with images, which tokenizers decode: more than the most that one may take there (`timeout_s`).
IMAGES_TIMEOUT_S = 330.0


class PipelineReadiness:
    """Implements `gateway.pipeline.port.Readiness`.

    A tokenizer's health includes the schedulers', which includes the workers and the links to detokenizers.
    """

    def __init__(self, pipeline: GrpcPipeline) -> None:
        """Use the connections of `pipeline` and the health that its tokenizers report."""
        self._pipeline = pipeline

    async def missing(self) -> list[str]:
        """Return the missing services, each in a few words."""
        missing = []
        if not self._pipeline.is_linked:
            missing.append("tokenizer: not connected")
        elif not await self._pipeline.is_serving():
            missing.append("tokenizer: connected, but it cannot serve (is the scheduler or a worker away?)")
        if not self._pipeline.is_subscribed:
            missing.append("detokenizer: not subscribed")
        return missing


class GrpcModel:
    """Implements `gateway.pipeline.port.Model`."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerAsyncStub, sessions: SessionHost) -> None:
        """`stub` calls the tokenizer, which also hosts `sessions`."""
        self._stub = stub
        self._sessions = sessions

    async def get_model(self) -> ModelInfo:
        call = self._stub.GetModel(tokenizer_pb2.GetModelRequest(), timeout=CARD_TIMEOUT_S)
        return model_from_wire(await answered(call))

    async def tokenize(self, subject: Subject, text: str, *, add_special_tokens: bool) -> Tokenization:
        request = tokenizer_pb2.TokenizeRequest(
            text=text, add_special_tokens=add_special_tokens, subject=subject_to_wire(subject)
        )
        answer = await answered(self._stub.Tokenize(request, timeout=TIMEOUT_S))
        return Tokenization(tuple(answer.ids), tuple(answer.tokens))

    async def detokenize(self, subject: Subject, ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        request = tokenizer_pb2.DetokenizeRequest(
            ids=ids, skip_special_tokens=skip_special_tokens, subject=subject_to_wire(subject)
        )
        return (await answered(self._stub.Detokenize(request, timeout=TIMEOUT_S))).text

    async def render_chat(self, subject: Subject, chat: ChatPrompt) -> Tokenization:
        request = tokenizer_pb2.RenderChatRequest(chat=chat_to_wire(chat), subject=subject_to_wire(subject))
        timeout = IMAGES_TIMEOUT_S if chat.images else TIMEOUT_S
        return Tokenization(tuple((await answered(self._stub.RenderChat(request, timeout=timeout))).ids))

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        return await self._sessions.open_session(wish)

    async def close_session(self, view: View, session: str) -> bool:
        return await self._sessions.close_session(view, session)
