"""One scheduler group in the fleet: its stream, its health and its load."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.tokenizer import metrics
from services.tokenizer.scheduler_link import SchedulerLink

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.types import Admission, RequestId, ScheduleRequest, SessionGrant, SessionWish, View
    from services.tokenizer.scheduler_link import SchedulerListener

WATCH_INTERVAL_S = 0.25
STATE_TIMEOUT_S = 2.0


class Replica:
    """Sends requests to one group and tracks those that it has not answered."""

    def __init__(self, name: str, channel: grpc.aio.Channel) -> None:
        """Use `channel` to reach the group `name`; the channel is closed when `run` ends."""
        self.name = name
        self._channel = channel
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)
        self._link = SchedulerLink(channel)
        self._listener: SchedulerListener | None = None
        self._is_serving = False
        self._reported_load = 0
        # Requests sent since the last report; without them, a burst would go entirely to the group that was idle
        # before.
        self._sent_since = 0
        self._unanswered: set[RequestId] = set()

    @property
    def can_serve(self) -> bool:
        """Whether it accepts new requests; a draining group only finishes its open ones."""
        return self._is_serving and self._link.is_connected

    @property
    def load(self) -> int:
        """Estimated number of open requests."""
        return self._reported_load + self._sent_since

    def submit(self, requests: Sequence[ScheduleRequest]) -> None:
        """Send requests.

        Raises:
            UnavailableError: the group is unavailable, or does not keep up.
        """
        self._link.submit(requests)
        self._sent_since += len(requests)
        self._unanswered.update(request.request_id for request in requests)
        metrics.ROUTED_TOTAL.labels(self.name).inc(len(requests))

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session here; see `SchedulerLink.open_session`."""
        return await self._link.open_session(wish)

    async def close_session(self, view: View, session: str) -> bool:
        """Close a session that was opened here; see `SchedulerLink.close_session`."""
        return await self._link.close_session(view, session)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Abort those requests that this group has."""
        self._link.abort(request_ids)

    async def run(self, listener: SchedulerListener) -> None:
        """Keep the stream open until cancelled; `listener` receives admissions and losses."""
        self._listener = listener
        metrics.REPLICA_SERVING.labels(self.name).set(0)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run(self))
                tasks.create_task(self._watch())
        finally:
            self._is_serving = False
            metrics.REPLICA_SERVING.remove(self.name)
            self.on_scheduler_lost()
            await self._channel.close()

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        """Pass the group's admissions to the listener."""
        known = list(admissions)
        self._unanswered.difference_update(admission.request_id for admission in known)
        if self._listener is not None:
            self._listener.on_admissions(known)

    def on_scheduler_lost(self, lost: Iterable[RequestId] | None = None) -> None:
        """Report the requests that the group will not answer."""
        unanswered, self._unanswered = self._unanswered, set()
        if unanswered and self._listener is not None:
            self._listener.on_scheduler_lost(unanswered)

    async def _watch(self) -> None:
        while True:
            self._is_serving = await self._link.can_serve()
            metrics.REPLICA_SERVING.labels(self.name).set(self._is_serving)
            if self._is_serving:
                await self._read_load()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _read_load(self) -> None:
        sent_before = self._sent_since
        try:
            state = await self._stub.GetState(scheduler_pb2.GetStateRequest(), timeout=STATE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return
        self._reported_load = state.waiting_requests + state.running_rows
        self._sent_since -= sent_before
