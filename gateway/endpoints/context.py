"""The objects that endpoints use, and the steps that several endpoints share."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fastapi import Request

from common.errors import PermissionDeniedError
from common.requests import GenerateRequest
from common.types import RequestId, RequestOptions
from gateway.delivery.answers import PlainAnswer
from gateway.delivery.deliveries import AnswerResponse, PiecewiseDelivery, WholeDelivery
from gateway.endpoints.shapes import ResponseHead
from gateway.images.images import check_images
from gateway.images.references import ImageSource
from gateway.quotas.quotas import Charge, prompt_tokens
from gateway.server.middleware import BATCH_CALLER, TENANT, add_headers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from common.audit.log import Audit, What
    from common.requests import ChatPrompt, ImageFile, Prompt
    from common.types import Subject
    from gateway.backends import Backend, Backends, ChosenModel
    from gateway.batches.batches import Batches
    from gateway.batches.files import Files
    from gateway.delivery.answer_context import AnswerContext
    from gateway.delivery.deliveries import PiecewiseRenderer, WholeRenderer
    from gateway.endpoints.chat.schema import ChatCompletionBody
    from gateway.endpoints.completions.schema import CompletionBody
    from gateway.endpoints.opening import Opening
    from gateway.generation.generations import Generations
    from gateway.identity.caller import Caller, Requester
    from gateway.identity.identity import Identity
    from gateway.images.images import Images
    from gateway.images.references import ImageReference
    from gateway.ledger.ledger import Ledger
    from gateway.metrics import GatewayMetrics
    from gateway.pipeline.port import ModelInfo, Tokenization
    from gateway.quotas.quotas import Lease, Quotas
    from gateway.state.aborts import Aborts
    from gateway.stored_responses.store import ResponseStore

NO_ADMINISTRATOR = (
    "This needs an administrator's credential; where neither API keys nor tokens are configured, a direct connection "
    "to localhost on the gateway's own machine."
)


# The operations of endpoints that generate.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/generate": "generate",
}


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on the memory and time that one client can use."""

    body_bytes: int
    request_timeout_ms: int | None
    max_priority: int = 0
    # Of a stream, for a slow client; beyond, its request is aborted.
    stream_buffer_bytes: int = 2**20
    # Silence after which a comment is sent on a stream, so that proxies do not close the connection.
    keep_alive_s: float = 15.0


@dataclass(slots=True)
class Spending:
    """Tokens that a request has used; the announced number until the actual one is known."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Context:
    """The objects that endpoints use, built once at start."""

    generations: Generations
    models: Backends
    identity: Identity
    quotas: Quotas
    stored: ResponseStore
    files: Files
    images: Images
    batches: Batches
    answers: AnswerContext
    aborts: Aborts
    ledger: Ledger
    audit: Audit
    metrics: GatewayMetrics
    limits: ClientLimits
    fingerprint: str

    async def caller(self, request: Request) -> Caller:
        """Return the caller of `request`; a dependency of endpoints.

        Raises:
            UnauthenticatedError: a credential is required, and it is missing or wrong.
        """
        line_of: Caller | None = request.scope.get(BATCH_CALLER)
        if line_of is not None:
            request.scope[TENANT] = line_of.tenant
            return line_of
        peer = request.client.host if request.client else None
        caller = await self.identity.caller(request.headers, peer, request.scope["http_version"])
        request.scope[TENANT] = caller.tenant
        return caller

    async def admin(self, request: Request) -> Caller:
        """Return the caller of `request`, who must be an administrator; a dependency of endpoints.

        Raises:
            UnauthenticatedError: a credential is required, and it is missing or wrong.
            PermissionDeniedError: the caller is not an administrator.
        """
        caller = await self.caller(request)
        if not caller.is_admin:
            raise PermissionDeniedError(NO_ADMINISTRATOR)
        return caller

    async def room_with_images(self) -> int:
        """Return the bytes that a body with images may have; 0 if no model takes images."""
        known = await self.models.known()
        if not any(card is not None and card.images is not None for _, card in known):
            return 0
        return self.limits.body_bytes + self.images.max_total_bytes // 3 * 4

    async def find_images(
        self,
        request: Request,
        requester: Requester,
        references: Sequence[ImageReference],
        model: str | None,
        adapter: str | None = None,
    ) -> dict[str, dict[str, str]]:
        """Return, for the `found` of an opening, the images of a request that it does not contain itself.

        With images at URLs, it is charged as one request more, so that limits hold before anything is fetched.
        """
        if all(reference.source is ImageSource.INLINE for reference in references):
            return {}
        chosen = await self.choose(requester.caller, model, adapter, must_name=False)
        return {"images": await self._find(request, requester, references, chosen.card)}

    async def images_of(
        self, request: Request, requester: Requester, card: ModelInfo, references: Sequence[ImageReference]
    ) -> tuple[ImageFile, ...]:
        """Return the images of a request that is not recorded, in the order of `references`."""
        if not references:
            return ()
        return await self.images.read(card, references, await self._find(request, requester, references, card))

    async def _find(
        self, request: Request, requester: Requester, references: Sequence[ImageReference], card: ModelInfo
    ) -> dict[str, str]:
        check_images(card, references)
        has_urls = any(reference.source is ImageSource.URL for reference in references)
        async with self.charged(request, requester.subject) if has_urls else nullcontext():
            return await self.images.find(card, requester, references)

    async def read_images(
        self, card: ModelInfo, references: Sequence[ImageReference], opening: Opening
    ) -> tuple[ImageFile, ...]:
        """Return the images of a request, in the order of `references`."""
        return await self.images.read(card, references, opening.found.get("images", {})) if references else ()

    def act(self, caller: Caller, action: str, **what: object) -> AbstractAsyncContextManager[What]:
        """Return the block in which an administrator's act is done; see `common.audit.log.Audit.act`."""
        actor = {"tenant": caller.tenant, "subject": caller.subject, "credential": caller.credential}
        return self.audit.act(action, actor, what)

    async def choose(
        self, caller: Caller, model: str | None, adapter: str | None = None, *, must_name: bool = True
    ) -> ChosenModel:
        """Return the model that a request of `caller` names, and its adapter; see `Backends.choose`."""
        return await self.models.choose(model, lambda name: self.may_use(caller, name), adapter, must_name=must_name)

    def may_use(self, caller: Caller, adapter: str) -> bool:
        """Whether `caller` may use an adapter: its credential or else its tenant's limits name it.

        Administrators may use all.
        """
        allowed = self.quotas.adapters(caller.tenant) if caller.adapters is None else caller.adapters
        return caller.is_admin or any(fnmatchcase(adapter, pattern) for pattern in allowed)

    @asynccontextmanager
    async def charged(self, request: Request, subject: Subject, tokens: int = 0) -> AsyncIterator[Spending]:
        """Charge for one request that is open during the block and uses about `tokens` tokens.

        Raises:
            LimitedError: it exceeds the rest of a limit.
            UnavailableError: the use cannot be counted now.
        """
        lease = await self._take(request, Charge(subject, 1, tokens))
        spending = Spending(tokens)
        try:
            yield spending
        finally:
            lease.settle(spending.tokens)

    async def charge_for_ending(self, request: Request, subject: Subject) -> None:
        """Charge for one request that ends or removes something; the limit of open requests does not apply to it.

        Raises:
            LimitedError: it exceeds the rest of a limit.
            UnavailableError: the use cannot be counted now.
        """
        lease = await self._take(request, Charge(subject, 1, 0, may_exceed_concurrent=True))
        lease.settle(0)

    async def render_chat(self, request: Request, subject: Subject, backend: Backend, chat: ChatPrompt) -> Tokenization:
        """Apply the model's chat template to a conversation, encode the result and charge for its tokens."""
        async with self.charged(request, subject, prompt_tokens(chat)) as spending:
            encoded = await backend.model.render_chat(subject, chat)
            spending.tokens = len(encoded.ids)
        return encoded

    async def _take(self, request: Request, charge: Charge) -> Lease:
        lease = await self.quotas.take(charge)
        add_headers(request.scope, lease.headers())
        return lease

    def head(self, response_id: str, model: str) -> ResponseHead:
        """Return the fields that all parts of a response repeat; `created` is now."""
        return ResponseHead(response_id, int(time.time()), model, self.fingerprint)

    def generate_request(
        self,
        opening: Opening,
        head: ResponseHead,
        requester: Requester,
        body: ChatCompletionBody | CompletionBody,
        prompt: Prompt,
        chosen: ChosenModel,
    ) -> GenerateRequest:
        """Return the generation request for `body`, with the response's id.

        Raises:
            InvalidRequestError: fields of the body contradict each other.
        """
        return GenerateRequest(
            request_id=RequestId(head.id),
            view=requester.view,
            model=chosen.card.name,
            prompt=prompt,
            options=RequestOptions(
                sampling=body.sampling(body.logprobs_wanted),
                stop=body.stop_conditions(body.token_limit),
                n=body.choices,
                priority=requester.priority(body.priority, self.limits.max_priority),
                cache_mode=requester.cache_mode(body.cache_mode),
                skip_special_tokens=body.skip_special_tokens is not False,
                timeout_ms=None if requester.caller.is_batch else self.limits.request_timeout_ms,
                trace=opening.trace,
                session=body.session,
                max_context_tokens=self.quotas.max_context(requester.subject),
                prompt_logprobs=body.prompt_logprobs_wanted,
                adapter=chosen.adapter,
                is_batch=requester.caller.is_batch,
            ),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            bad_words=tuple(body.bad_words or ()),
            prediction=body.predicted_text,
            routing_key=body.routing_key,
            returns_prompt_ids=bool(body.return_token_ids),
            operation=OPERATIONS.get(opening.path, opening.path),
        )

    def whole(self, requests: Sequence[GenerateRequest], renderer: WholeRenderer) -> AnswerResponse:
        """Submit `requests` and respond with one body."""
        return AnswerResponse(PlainAnswer(self.answers, requests, None), WholeDelivery(renderer))

    def in_pieces(self, requests: Sequence[GenerateRequest], renderer: PiecewiseRenderer) -> AnswerResponse:
        """Submit `requests` and respond with one body, which is rendered piecewise because that takes long."""
        return AnswerResponse(PlainAnswer(self.answers, requests, None), PiecewiseDelivery(renderer))
