"""A scheduler that writes down what it is sent, and admits or keeps silent on command."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any

from common.types import SessionGrant
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from common.types import SessionWish, View


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Serves `Submit`; keeps to `SessionHost`, too."""

    def __init__(self) -> None:
        self.messages: list[scheduler_pb2.SchedulerSubmitRequest] = []
        # Set to False to leave requests unanswered.
        self.answers = True
        self.others_serve = False
        self.wishes: list[scheduler_pb2.RoleWish] = []
        self.rejection: common_pb2.RequestError | None = None
        # Of the images of accepted requests.
        self.keeps_images = False
        # Whether requests with images that have no pixels are refused, and have to be sent again.
        self.lacks_images = False
        # Whether all requests with images are refused so, those with pixels included.
        self.lacks_all_images = False
        self.sessions: set[tuple[str, str]] = set()
        # Whether turns of sessions that are not open are refused.
        self.needs_sessions = False
        # Names of turns that no session has.
        self.unknown_turns: set[str] = set()
        # Reported with every answer; None: never, as by schedulers of earlier versions.
        self.load: scheduler_pb2.SchedulerLoad | None = None
        # Set to True to let heartbeats go unanswered.
        self.is_silent = False
        self._changed = asyncio.Event()

    @property
    def requests(self) -> list[scheduler_pb2.ScheduleRequest]:
        return [schedule for message in self.messages for schedule in message.schedules]

    @property
    def aborts(self) -> list[str]:
        return [abort.request_id for message in self.messages for abort in message.aborts]

    async def Submit(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.SchedulerSubmitResponse]:
        numbers = count(1)
        async for answer in self._answers(request_iterator):
            if self.load is not None:
                answer.load.CopyFrom(self.load)
                answer.sequence = next(numbers)
            yield answer

    async def _answers(
        self, request_iterator: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest]
    ) -> AsyncIterator[scheduler_pb2.SchedulerSubmitResponse]:
        async for message in request_iterator:
            if message.HasField("others_serve"):
                self.others_serve = message.others_serve
            if message.heartbeat and self.load is not None and not self.is_silent:
                yield scheduler_pb2.SchedulerSubmitResponse()
            if message.HasField("role_wish"):
                self.wishes.append(message.role_wish)
            if message.heartbeat or message.HasField("others_serve") or message.HasField("role_wish"):
                continue
            self.messages.append(message)
            self._changed.set()
            if message.schedules and self.answers:
                yield scheduler_pb2.SchedulerSubmitResponse(
                    admissions=[self._admission(schedule) for schedule in message.schedules]
                )

    def _admission(self, schedule: scheduler_pb2.ScheduleRequest) -> common_pb2.Admission:
        lacks_images = self.lacks_images and not all(image.shape for image in schedule.images)
        lacks_images = lacks_images or (self.lacks_all_images and bool(schedule.images))
        unavailable = common_pb2.RequestError(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="not kept")
        if self.needs_sessions and schedule.HasField("turn") and not self._may_run(schedule):
            message = "no such turn" if self._has_session(schedule) else "is not open"
            refusal = common_pb2.RequestError(code=common_pb2.ERROR_CODE_INVALID_REQUEST, message=message)
            return common_pb2.Admission(request_id=schedule.request_id, rejected=refusal, lacks_session=True)
        return common_pb2.Admission(
            request_id=schedule.request_id,
            rejected=unavailable if lacks_images else self.rejection,
            prompt_tokens=len(schedule.token_ids),
            lacks_images=lacks_images,
            keeps_images=self.keeps_images and bool(schedule.images) and not lacks_images,
        )

    def _may_run(self, schedule: scheduler_pb2.ScheduleRequest) -> bool:
        turn = schedule.turn
        needs_none = bool(turn.conversation_token_ids) or (schedule.HasField("resume") and not turn.HasField("after"))
        is_there = self._has_session(schedule) and turn.after not in self.unknown_turns
        return is_there or (needs_none and not turn.only_in_session)

    def _has_session(self, schedule: scheduler_pb2.ScheduleRequest) -> bool:
        return (schedule.view.subject.name, schedule.session) in self.sessions

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        self.sessions.add((wish.view.subject.name, wish.session))
        return SessionGrant(wish.capacity_tokens or 96, 1000)

    async def close_session(self, view: View, session: str) -> bool:
        was_open = (view.subject.name, session) in self.sessions
        self.sessions.discard((view.subject.name, session))
        return was_open

    async def find_session(self, view: View, session: str, after: str | None = None) -> bool:
        return (view.subject.name, session) in self.sessions and after not in self.unknown_turns

    async def until(self, condition: Callable[[FakeScheduler], object], timeout_s: float = 60.0) -> None:
        """Wait until `condition` holds for what has been received."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()
