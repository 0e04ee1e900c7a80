"""A detokenizer that turns nothing into text but remembers everything it is pushed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from common.types import RequestId


class RecordingDetokenizer(detokenizer_pb2_grpc.DetokenizerServicer):
    """Records pushes by request; `stop_after` ends a choice as if a stop text had matched."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.opened: set[str] = set()
        self.cached: dict[str, int] = {}
        # Cached tokens of all requests, by tier and level.
        self.cached_parts: Counter[str] = Counter()
        self.finishes: dict[str, detokenizer_pb2.ChoiceFinish] = {}
        # Of the weights, by request, when it finished.
        self.versions: dict[str, str] = {}
        self.stop_after: dict[str, int] = {}
        self.gone: set[str] = set()
        self._names: dict[int, str] = {}

    def output_of(self, request_id: RequestId | str) -> list[int]:
        return self.tokens.get(request_id, [])

    async def Push(
        self,
        request_iterator: AsyncIterator[detokenizer_pb2.PushRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[detokenizer_pb2.PushResponse]:
        async for message in request_iterator:
            answer = detokenizer_pb2.PushResponse()
            for opened in message.opens:
                self._names[opened.handle] = opened.request_id
                self.opened.add(opened.request_id)
                if opened.request_id in self.gone:
                    answer.gone_handles.append(opened.handle)
            for started in message.starts:
                self.cached[self._names[started.handle]] = started.cached_tokens
                self.cached_parts.update({f"{part.tier}/{part.level}": part.tokens for part in started.cached})
            for handle, token in zip(message.handles, message.token_ids, strict=True):
                name = self._names[handle]
                self.tokens.setdefault(name, []).append(token)
                if len(self.tokens[name]) == self.stop_after.get(name):
                    answer.stop_hits.add(handle=handle, completion_tokens=len(self.tokens[name]))
            for finish in message.finishes:
                self.finishes[self._names[finish.handle]] = finish
                self.versions[self._names[finish.handle]] = message.weight_version
            if answer.stop_hits or answer.gone_handles:
                yield answer
