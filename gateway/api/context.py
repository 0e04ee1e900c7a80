"""What the endpoints work with, and the steps that several of them take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.requests import GenerateRequest
from common.types import CacheMode, RequestId
from gateway.body import read_object
from gateway.identity import principal_of
from gateway.render.shapes import ResponseHead
from gateway.responses import GenerationResponse, StreamDelivery, WholeDelivery
from gateway.trace import trace_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from common.requests import Prompt
    from gateway.generations import Generations
    from gateway.identity import Caller, Identity
    from gateway.metrics import GatewayMetrics
    from gateway.render.shapes import StreamRenderer, WholeRenderer
    from gateway.ring.port import Model, Readiness
    from gateway.schemas.chat import ChatCompletionBody
    from gateway.schemas.completions import CompletionBody
    from gateway.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one client can make this process hold."""

    body_bytes: int
    stream_buffer_bytes: int
    request_timeout_ms: int | None


@dataclass(frozen=True, slots=True)
class Context:
    """The objects behind the endpoints, built once at start."""

    generations: Generations
    model: Model
    served: ServedModel
    identity: Identity
    readiness: Readiness
    metrics: GatewayMetrics
    limits: Limits
    fingerprint: str

    def caller(self, request: Request) -> Caller:
        """Return whose request this is.

        Raises:
            UnauthenticatedError: a key is asked for, and there is none or an unknown one.
        """
        return self.identity.caller(request.headers, request.client.host if request.client else None)

    async def body(self, request: Request) -> dict[str, object]:
        """Return the JSON object in the body (see `read_object` for what it raises)."""
        return await read_object(request, self.limits.body_bytes)

    def head(self, response_id: str, model: str) -> ResponseHead:
        """Return what all parts of a response made now repeat."""
        return ResponseHead(response_id, int(time.time()), model, self.fingerprint)

    def generate_request(
        self,
        request: Request,
        head: ResponseHead,
        caller: Caller,
        body: ChatCompletionBody | CompletionBody,
        prompt: Prompt,
    ) -> GenerateRequest:
        """Return what `body` asks the ring for, under the response's id.

        Raises:
            InvalidRequestError: fields of the body contradict each other.
        """
        return GenerateRequest(
            request_id=RequestId(head.id),
            principal=principal_of(caller, body.user_names),
            model=head.model,
            prompt=prompt,
            sampling=body.sampling(body.logprobs_wanted),
            stop=body.stop_conditions(body.token_limit),
            n=body.choices,
            priority=body.priority or 0,
            cache_mode=caller.cache_mode.at_least(body.cache_mode or CacheMode.DEFAULT),
            skip_special_tokens=body.skip_special_tokens is not False,
            timeout_ms=self.limits.request_timeout_ms,
            trace=trace_of(request.headers),
            session=body.session,
        )

    def stream(self, requests: Sequence[GenerateRequest], renderer: StreamRenderer) -> GenerationResponse:
        """Submit `requests` and answer with events as they come."""
        delivery = StreamDelivery(renderer)
        return GenerationResponse(self.generations, requests, delivery, buffer_bytes=self.limits.stream_buffer_bytes)

    def whole(self, requests: Sequence[GenerateRequest], renderer: WholeRenderer) -> GenerationResponse:
        """Submit `requests` and answer in one piece."""
        return GenerationResponse(self.generations, requests, WholeDelivery(renderer))
