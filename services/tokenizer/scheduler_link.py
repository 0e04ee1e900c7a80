"""The stream to the scheduler, with values instead of protobuf messages as its interface."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from common.errors import UnavailableError
from common.recent_images import KeptElsewhere, pixels_key
from common.rpc.channel import is_serving, renew
from common.rpc.sessions import SessionsClient
from common.rpc.stream import StreamLink, StreamSource
from common.wire.answers import admission_from_wire
from common.wire.requests import load_from_wire, wish_to_wire, write_schedule_request
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import grpc

    from common.types import (
        Admission,
        LoadReport,
        RequestId,
        RoleWish,
        ScheduleRequest,
        SessionGrant,
        SessionWish,
        View,
    )

SERVICE = "pando.v1.Scheduler"
# Keeps a message of 4-byte ids far below gRPC's limit of 64 MiB.
MAX_MESSAGE_TOKENS = 2_000_000
BYTES_PER_TOKEN = 4
# Aborts kept for an unavailable scheduler; a lost abort only costs it unneeded work.
MAX_KEPT_ABORTS = 65_536
# Heartbeats, two per second, without an answer after which a scheduler's reports do not count.
STALE_BEATS = 3


class SchedulerListener(Protocol):
    """Receives the scheduler's admissions, and the losses of requests."""

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        """The scheduler has answered."""

    def on_load(self, load: LoadReport) -> None:
        """The scheduler has reported its load, before the admissions that it includes are passed on."""

    def on_scheduler_lost(self, lost: Iterable[RequestId] | None = None) -> None:
        """The scheduler became unavailable and will not answer `lost`; None: all requests that were sent to it."""


@dataclass(frozen=True, slots=True)
class _Seeing:
    """A request with images that the scheduler has not answered; `is_whole`: it was sent with all of their pixels."""

    request: ScheduleRequest
    is_whole: bool


class SchedulerLink:
    """Sends batches of requests, and passes admissions to the listener."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Prepare a stream on `channel`; `run` opens it."""
        self._channel = channel
        self._sessions = SessionsClient(channel)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        self._listener: SchedulerListener | None = None
        self._others_serve = False
        # The latest report of this stream; schedulers of earlier versions send none.
        self._load: LoadReport | None = None
        # Images whose pixels the scheduler keeps, and the requests with images that it has not answered.
        self._kept_images = KeptElsewhere()
        self._seeing: dict[RequestId, _Seeing] = {}
        self._kept_aborts: deque[RequestId] = deque(maxlen=MAX_KEPT_ABORTS)
        self._link: StreamLink[scheduler_pb2.SchedulerSubmitRequest, scheduler_pb2.SchedulerSubmitResponse] = (
            StreamLink(
                "scheduler",
                StreamSource(
                    lambda: stub.Submit(),
                    lambda: scheduler_pb2.SchedulerSubmitRequest(heartbeat=True),
                    lambda: renew(channel),
                    lambda: self._others_serve,
                ),
                self._on_message,
                on_connected=self._on_connected,
                on_disconnected=self._on_disconnected,
            )
        )

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open."""
        return self._link.connected

    @property
    def reports_load(self) -> bool:
        """Whether the scheduler reports its load on this stream."""
        return self._load is not None

    @property
    def is_stale(self) -> bool:
        """Whether the scheduler has not answered for some heartbeats, so that its reports may be wrong."""
        return self._link.silent_beats >= STALE_BEATS

    async def can_serve(self) -> bool:
        """Whether the stream is open and the scheduler reports that it would serve a request, now or once woken."""
        if self._load is not None:
            return self.is_connected and (self._load.serves or self._load.sleeps) and not self.is_stale
        return self.is_connected and await is_serving(self._channel, SERVICE)

    async def run(self, listener: SchedulerListener) -> None:
        """Keep the stream open until cancelled; `listener` receives admissions and losses."""
        self._listener = listener
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.run())
            tasks.create_task(self._kept_images.run())

    def submit(self, requests: Sequence[ScheduleRequest]) -> None:
        """Send all requests or none, in as few messages as possible.

        Raises:
            UnavailableError: the scheduler is unavailable, or does not keep up.
        """
        sent: list[RequestId] = []
        shortened = [self._without_known_pixels(request) for request in requests]
        for part in split(shortened):
            try:
                self._send(part)
            except UnavailableError:
                self.abort(sent)
                raise
            sent.extend(request.request_id for request in part)
        for request, written in zip(requests, shortened, strict=True):
            if request.may_keep_images:
                is_whole = all(image.pixels is not None for image in written.images)
                self._seeing[request.request_id] = _Seeing(request, is_whole)

    def _send(self, requests: Iterable[ScheduleRequest]) -> None:
        message = scheduler_pb2.SchedulerSubmitRequest()
        for request in requests:
            write_schedule_request(request, message.schedules.add())
        self._link.send(message)

    def _without_known_pixels(self, request: ScheduleRequest) -> ScheduleRequest:
        if not request.may_keep_images:
            return request
        images = tuple(
            replace(image, pixels=None) if self._kept_images.has(request.view, pixels_key(image)) else image
            for image in request.images
        )
        return replace(request, images=images)

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session.

        Raises:
            PandoError: the scheduler refuses it, or is unavailable.
        """
        return await self._sessions.open_session(wish)

    async def close_session(self, view: View, session: str) -> bool:
        """Close a session; return whether it was open.

        Raises:
            PandoError: the scheduler is unavailable.
        """
        return await self._sessions.close_session(view, session)

    async def find_session(self, view: View, session: str, after: str | None = None) -> bool:
        """Return whether a session is open, and has the turn `after` if that is not None.

        Raises:
            PandoError: the scheduler is unavailable.
        """
        return await self._sessions.find_session(view, session, after)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Send aborts now, or when the scheduler reconnects, since it may still run the requests."""
        aborted = list(request_ids)
        for request_id in aborted:
            self._seeing.pop(request_id, None)
        self._kept_aborts.extend(aborted)
        if self.is_connected:
            self._send_aborts()

    def note_others(self, *, serve: bool) -> None:
        """Report whether another group would serve requests now."""
        self._others_serve = serve
        if self.is_connected:
            self._send_others()

    def wish_role(self, wish: RoleWish) -> None:
        """Send a wish for another role; one that is lost is wished again if the load still asks for it."""
        with contextlib.suppress(UnavailableError):
            self._link.send(scheduler_pb2.SchedulerSubmitRequest(role_wish=wish_to_wire(wish)))

    def _send_others(self) -> None:
        with contextlib.suppress(UnavailableError):
            self._link.send(scheduler_pb2.SchedulerSubmitRequest(others_serve=self._others_serve))

    def _send_aborts(self) -> None:
        aborts = [common_pb2.Abort(request_id=request_id) for request_id in self._kept_aborts]
        with contextlib.suppress(UnavailableError):
            self._link.send(scheduler_pb2.SchedulerSubmitRequest(aborts=aborts))
            self._kept_aborts.clear()

    def _on_message(self, message: scheduler_pb2.SchedulerSubmitResponse) -> None:
        if message.HasField("load"):
            self._load = load_from_wire(message.load)
        if self._listener is not None:
            if self._load is not None:
                self._listener.on_load(self._load)
            answers = (self._answered(admission_from_wire(admission)) for admission in message.admissions)
            self._listener.on_admissions([answer for answer in answers if answer is not None])

    def _answered(self, admission: Admission) -> Admission | None:
        """Return the answer to a request, or None if it is sent again because the scheduler lacks pixels."""
        seeing = self._seeing.pop(admission.request_id, None)
        # These two are about the pixels here; the tokenizer says itself which files it keeps or lacks.
        answer = replace(admission, keeps_images=False, lacks_images=False)
        if seeing is None:
            return answer
        request = seeing.request
        keys = [pixels_key(image) for image in request.images]
        if admission.keeps_images:
            self._kept_images.note(request.view, keys)
        if not admission.lacks_images:
            return answer
        self._kept_images.forget(request.view, keys)
        if seeing.is_whole:
            # It would be refused for ever.
            return answer
        try:
            self._send([request])
        except UnavailableError as error:
            return replace(answer, rejected=error.to_failure())
        self._seeing[request.request_id] = _Seeing(request, is_whole=True)
        return None

    def _on_connected(self) -> None:
        if self._others_serve:
            self._send_others()
        if self._kept_aborts:
            self._send_aborts()

    def _on_disconnected(self, _reason: str) -> None:
        self._load = None
        self._kept_images.clear()
        self._seeing.clear()
        if self._listener is not None:
            self._listener.on_scheduler_lost()


def split(requests: Sequence[ScheduleRequest], max_tokens: int = MAX_MESSAGE_TOKENS) -> Iterator[list[ScheduleRequest]]:
    """Divide requests into groups of at most `max_tokens` tokens, or as many bytes of images.

    Of a resubmitted request, the output so far counts, and the conversation that it continues. A longer request is a
    group of its own.
    """
    part: list[ScheduleRequest] = []
    tokens = 0
    for request in requests:
        length = _tokens_of(request)
        if part and tokens + length > max_tokens:
            yield part
            part, tokens = [], 0
        part.append(request)
        tokens += length
    if part:
        yield part


def _tokens_of(request: ScheduleRequest) -> int:
    resume, turn = request.options.resume, request.options.turn
    images = sum(image.pixels.nbytes for image in request.images if image.pixels is not None)
    before = len(turn.conversation_ids) if turn is not None else 0
    output = len(resume.token_ids) if resume is not None else 0
    return before + len(request.token_ids) + output + len(request.prediction_ids) + images // BYTES_PER_TOKEN
