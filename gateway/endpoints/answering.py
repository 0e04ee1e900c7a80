"""Answers of endpoints that generate: new ones, one that is running and is joined, or one that is continued.

An answer is planned from its `Opening` alone, which its record contains: another gateway, or the same one later, plans
it again from there and renders the same events.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import orjson
from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError, QueueFullError, UnavailableError
from common.logs import get_logger
from common.names import check_name
from gateway.answer_records.records import NewRecord, claim_name, record_name
from gateway.delivery.answers import PlainAnswer
from gateway.delivery.deliveries import (
    NO_EVENT,
    AnswerResponse,
    BackgroundDelivery,
    EventNumbers,
    ReceivedEvent,
    StreamDelivery,
    WholeDelivery,
    end_at_once,
)
from gateway.delivery.recorded_answer import RecordedAnswer
from gateway.endpoints.opening import Json, Opening
from gateway.endpoints.routing import BODY, STREAMED
from gateway.endpoints.schema import Schema, parse
from gateway.identity.caller import Caller
from gateway.server.errors import HttpError
from gateway.server.middleware import begin_trace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import Message

    from common.requests import GenerateRequest
    from gateway.delivery.deliveries import Delivery, StreamRenderer, WholeRenderer
    from gateway.endpoints.context import Context
    from gateway.identity.caller import Requester

BodyT = TypeVar("BodyT", bound=Schema)

IDEMPOTENCY_KEY = "idempotency-key"
LAST_EVENT_ID = "last-event-id"
# Of the id of an event, after the answer's.
EVENT_NUMBER = re.compile(r"([0-9]{1,9})(?:\.([0-9a-f]{8}))?")
PLAIN_AIOHTTP = re.compile(r"Python/[\d.]+ aiohttp/")


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The requests of an answer, and its renderer: exactly one of the two."""

    requests: Sequence[GenerateRequest]
    stream: StreamRenderer | None = None
    whole: WholeRenderer | None = None
    # Awaited before the end is sent, by the gateway that has generated it.
    before_end: Callable[[], Awaitable[None]] = end_at_once
    # Whether the events have ids, with which the stream can be continued.
    has_event_ids: bool = True
    # Whether it is generated also while no client reads it.
    in_background: bool = False
    # Returns the response of the POST in place of the answer.
    receipt: Callable[[], Awaitable[Response]] | None = None


@dataclass(frozen=True, slots=True)
class AnswerKind(Generic[BodyT]):
    """An endpoint that generates."""

    path: str
    schema: type[BodyT]
    new_id: Callable[[BodyT], str]
    requester: Callable[[Caller, BodyT], Requester]
    plan: Callable[[Context, Opening, BodyT, Requester], Awaitable[AnswerPlan]]
    # Looks up the `found` of an opening.
    look_up: Callable[[Context, Request, Caller, BodyT], Awaitable[Json]] | None = None
    # Whether `stream_options.include_event_ids` says if events have ids.
    has_stream_options: bool = False


async def answer(context: Context, request: Request, caller: Caller, kind: AnswerKind[BodyT], body: BodyT) -> Response:
    """Answer a POST.

    Raises:
        HttpError: the request names an answer that is unknown, or the answer to another body.
        PandoError: the request is refused.
    """
    raw: Json = request.scope[BODY]
    if (received := last_event(request)) is not None:
        return await join(context, kind, record_name(caller.tenant, caller.subject, received[0]), received[1], raw)
    requester = kind.requester(caller, body)
    claim = _claim(request, caller, requester, kind.path)
    if claim is not None and (name := await _claimed(context, claim)) is not None:
        recorded = await find_opening(context, kind, name)
        if recorded is not None:
            _check_body(recorded, raw)
            return await _join(context, kind, name, recorded)
        # It has been forgotten just now, with its key, as its request has failed. So this is a new one.
    found = {} if kind.look_up is None else await kind.look_up(context, request, caller, body)
    opening = Opening(
        kind.path,
        raw,
        caller,
        kind.new_id(body),
        int(time.time()),
        begin_trace(request.scope, request.headers),
        found=found,
    )
    plan = await kind.plan(context, opening, body, requester)
    opening = replace(opening, seed=plan.requests[0].options.sampling.seed)
    if kind.has_stream_options and _reads_lines(request, raw):
        plan = replace(plan, has_event_ids=False)
    if claim is None and not plan.in_background and not (plan.stream and plan.has_event_ids):
        return _plain(context, plan)
    return await _record(context, kind, opening, plan, claim)


async def join(
    context: Context,
    kind: AnswerKind[BodyT],
    name: str,
    received: ReceivedEvent = NO_EVENT,
    raw: Json | None = None,
    *,
    streams: bool = False,
) -> Response:
    """Deliver a recorded answer after the event `received`; `raw` is the body that must be the same.

    `streams` requires its events, also if its own request had asked for something else.

    Raises:
        HttpError: there is no such record, its request has another body, or it has no events.
    """
    opening = await find_opening(context, kind, name)
    if opening is None:
        raise HttpError(404, "There is no such answer: its id is wrong, or it is no longer recorded.")
    if raw is not None:
        _check_body(opening, raw)
    return await _join(context, kind, name, opening, received, streams=streams)


def _check_body(opening: Opening, raw: Json) -> None:
    if raw != opening.body:
        raise HttpError(422, "The answer belongs to a request with another body: repeat the same body, or leave out "
                             "'Idempotency-Key' and 'Last-Event-ID'.")  # fmt: skip


async def _join(
    context: Context,
    kind: AnswerKind[BodyT],
    name: str,
    opening: Opening,
    received: ReceivedEvent = NO_EVENT,
    *,
    streams: bool = False,
) -> Response:
    """Deliver the recorded answer with this opening."""
    plan = await plan_again(context, kind, opening)
    if streams and plan.stream is None:
        raise HttpError(400, "This response has no events: it was created without 'stream' and 'background'.")
    if plan.receipt is not None and not streams:
        return await plan.receipt()
    delivery = _delivery(context, plan, EventNumbers(opening.id, opening.seed, received))
    return AnswerResponse(_reader(context, name, plan, opening), delivery)


async def find_opening(context: Context, kind: AnswerKind[BodyT], name: str) -> Opening | None:
    """Return the opening of a recorded answer of this kind."""
    request = await context.answers.records.request(name)
    opening = None if request is None else Opening.decode(request)
    return opening if opening is not None and opening.path == kind.path else None


async def plan_again(context: Context, kind: AnswerKind[BodyT], opening: Opening) -> AnswerPlan:
    """Plan a recorded answer as it was planned before."""
    body = parse(kind.schema, opening.body)
    plan = await kind.plan(context, opening, body, kind.requester(opening.caller, body))
    return replace(plan, requests=[_with_seed(request, opening.seed) for request in plan.requests])


async def adopt(context: Context, kind: AnswerKind[BodyT], name: str) -> None:
    """Generate the rest of an answer in the background, if no living gateway does."""
    opening = await find_opening(context, kind, name)
    if opening is None:
        return
    plan = await plan_again(context, kind, opening)
    adopted = _reader(context, name, plan, opening)
    try:
        if await adopted.adopt():
            get_logger("answers").info("answer.adopted", answer_id=opening.id)
            await _background_delivery(plan).deliver(adopted, _discard)
    except QueueFullError:
        pass  # its subject has too many open requests: it is tried again
    finally:
        adopted.close("shutdown")


def add_continuation(router: APIRouter, context: Context, kind: AnswerKind[BodyT]) -> None:
    """Add the route with which a client continues a stream without sending its request again."""

    @router.get(kind.path, responses=STREAMED)
    async def continue_stream(request: Request, caller: Caller = Depends(context.caller)) -> Response:
        """Continue a stream after the event that the header Last-Event-ID names, as browsers' EventSource does."""
        received = last_event(request)
        if received is None:
            message = f"GET {kind.path} continues a stream: it needs the header 'Last-Event-ID' with an event's id."
            raise HttpError(405, message, headers={"allow": "POST"})
        return await join(context, kind, record_name(caller.tenant, caller.subject, received[0]), received[1])


def _plain(context: Context, plan: AnswerPlan) -> Response:
    return AnswerResponse(
        PlainAnswer(context.answers, plan.requests, _buffer(context, plan)), _delivery(context, plan, None)
    )


async def _record(
    context: Context, kind: AnswerKind[BodyT], opening: Opening, plan: AnswerPlan, claim: str | None
) -> Response:
    """Open a record and answer; without a record if there is none to be had, unless that is indispensable."""
    answers, caller = context.answers, opening.caller
    name, owner = record_name(caller.tenant, caller.subject, opening.id), answers.new_owner()
    try:
        if not answers.records.lifetime_s:
            raise UnavailableError("Answers are not recorded here (gateway.answers.lifetime_s is 0).")
        subject = plan.requests[0].view.subject
        record = NewRecord(name, claim, subject, opening.encode(), owner, plan.in_background)
        claimed = await answers.records.open(record)
    except BaseException as error:
        answers.forget_owner(owner)
        if getattr(error, "was_sent", isinstance(error, asyncio.CancelledError)):
            # It may be open nevertheless. A repeated request finds a record with a claim, and generates its answer.
            answers.insist(lambda: answers.records.drop(name) if claim is None else answers.give_up(name, owner, None))
        if plan.in_background or not isinstance(error, (UnavailableError, QueueFullError, TypeError)):
            raise
        return _plain(context, plan)
    if claimed is not None:
        answers.forget_owner(owner)
        assert claim is not None, "a record without a claim is always a new one"
        holder = await _confirmed(context, claim, claimed)
        joined = None if holder is None else await find_opening(context, kind, holder)
        if holder is None or joined is None:
            raise UnavailableError("The answer with this 'Idempotency-Key' was not found just now; try again.")
        _check_body(joined, opening.body)
        return await _join(context, kind, holder, joined)
    recorded = RecordedAnswer(
        answers,
        name,
        plan.requests,
        owner=owner,
        created_at=opening.created,
        buffer_bytes=_buffer(context, plan),
    )
    if not plan.in_background:
        return AnswerResponse(recorded, _delivery(context, plan, EventNumbers(opening.id, opening.seed)))
    try:
        await recorded.begin(lambda: None)
    except BaseException:
        recorded.close(None)
        raise
    answers.spawn(_generate_in_background(recorded, _background_delivery(plan)))
    if plan.receipt is not None:
        return await plan.receipt()
    again = await plan_again(context, kind, opening)
    delivery = _delivery(context, again, EventNumbers(opening.id, opening.seed))
    return AnswerResponse(_reader(context, name, again, opening), delivery)


async def _generate_in_background(recorded: RecordedAnswer, delivery: Delivery) -> None:
    try:
        await delivery.deliver(recorded, _discard)
    finally:
        recorded.close("shutdown")


async def _discard(_message: Message) -> None:
    """Send nothing."""


def _reader(context: Context, name: str, plan: AnswerPlan, opening: Opening) -> RecordedAnswer:
    buffer = None if plan.in_background else _buffer(context, plan)
    return RecordedAnswer(
        context.answers, name, plan.requests, owner=None, created_at=opening.created, buffer_bytes=buffer
    )


def _buffer(context: Context, plan: AnswerPlan) -> int | None:
    return context.limits.stream_buffer_bytes if plan.stream is not None and not plan.in_background else None


def _delivery(context: Context, plan: AnswerPlan, numbers: EventNumbers | None) -> Delivery:
    if plan.stream is None:
        assert plan.whole is not None
        return WholeDelivery(plan.whole, plan.before_end)
    return StreamDelivery(
        plan.stream, context.limits.keep_alive_s, plan.before_end, numbers if plan.has_event_ids else None
    )


def _background_delivery(plan: AnswerPlan) -> Delivery:
    assert plan.stream is not None, "answers in the background are rendered as events"
    return BackgroundDelivery(plan.stream, plan.before_end)


def _with_seed(request: GenerateRequest, seed: int | None) -> GenerateRequest:
    options = request.options
    assert seed is not None, "the record was opened after its first planning"
    return replace(request, options=replace(options, sampling=replace(options.sampling, seed=seed)))


def last_event(request: Request) -> tuple[str, ReceivedEvent] | None:
    """Return the answer's id and the event in the header Last-Event-ID, if the request has it."""
    value = request.headers.get(LAST_EVENT_ID)
    if not value:
        return None
    answer_id, _, event = check_name("Last-Event-ID", value).rpartition("/")
    parts = EVENT_NUMBER.fullmatch(event)
    if not answer_id or parts is None:
        message = "'Last-Event-ID' should be the id of an event of a stream, such as 'chatcmpl-…/17.0f3a9c2b'."
        raise InvalidRequestError(message, param="Last-Event-ID")
    number, check = parts.groups()
    return answer_id, ReceivedEvent(int(number), None if check is None else int(check, 16))


def _reads_lines(request: Request, raw: Json) -> bool:
    """Return whether the client probably takes every line of a stream for JSON, as vLLM's and SGLang's benchmarks do.

    These name no client of their own: their user agent is aiohttp's.
    """
    options = raw.get("stream_options")
    is_asked = isinstance(options, dict) and options.get("include_event_ids") is True
    return not is_asked and PLAIN_AIOHTTP.match(request.headers.get("user-agent", "")) is not None


def _claim(request: Request, caller: Caller, requester: Requester, path: str) -> str | None:
    key = request.headers.get(IDEMPOTENCY_KEY)
    if not key:
        return None
    view = requester.view
    subject = orjson.dumps([view.subject.tenant, view.subject.name, view.salt]).decode()
    return claim_name(caller.tenant, caller.subject, subject, path, check_name("Idempotency-Key", key))


async def _claimed(context: Context, claim: str) -> str | None:
    """Return the name of the record with a claim; None also if the records are unavailable.

    Raises:
        UnavailableError: there is one, but its name could not be confirmed.
    """
    try:
        name = await context.answers.records.claimed(claim)
    except UnavailableError:
        return None
    return await _confirmed(context, claim, name)


async def _confirmed(context: Context, claim: str, name: str | None) -> str | None:
    """Return the name of the record with a claim, which was read as `name`, as soon as two replies agree.

    A name that was damaged on the way is not damaged in the same way again. A client that repeats its request would
    take it for the end of its answer that there is no record of that name.
    """
    while name is not None:
        again = await context.answers.records.claimed(claim)
        if again == name:
            break
        name = again
    return name
