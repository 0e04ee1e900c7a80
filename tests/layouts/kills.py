"""Kills the services of a layout while it answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import grpc

from common.rpc.options import CHANNEL_OPTIONS
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.e2e.served import Served
    from tests.layouts.load import Load

# A service is killed once so many requests have been answered since the kill before, so that no request sees three.
REQUESTS_PER_KILL = 60
RECOVERY_S = 180.0


class Killer:
    """Kills workers and schedulers, one after the other, each once all groups serve again."""

    def __init__(self, served: Served, seed: str) -> None:
        self.killed: list[str] = []
        # Most pages that the last group has read from others in one life of its scheduler.
        self.fetched = 0
        self._served = served
        self._random = random.Random(seed)
        names = [spec.name for spec in served.deployment.layout.services]
        self.schedulers = [name for name in names if name.startswith("scheduler")]
        self._names = [*self.schedulers, *(name for name in names if name.startswith("worker"))]

    def disturb(self, load: Load) -> None:
        next_at = REQUESTS_PER_KILL // 2
        left: list[str] = []
        while load.wait_for(next_at):
            self.until_ready()
            if not left:
                left = self._random.sample(self._names, len(self._names))
            self._kill(left.pop())
            next_at = load.answered + REQUESTS_PER_KILL
        self.until_ready()

    def _kill(self, name: str) -> None:
        deployment = self._served.deployment
        before = deployment.pid_of(name)
        self.note_fetched()
        deployment.kill(name)
        self.killed.append(name)
        wait_until(lambda: deployment.pid_of(name) not in (None, before), RECOVERY_S)
        self.until_ready()

    def note_fetched(self) -> None:
        state = state_of(self._served, self.schedulers[-1])
        self.fetched = max(self.fetched, state.disaggregation.fetched_pages if state else 0)

    def until_ready(self) -> None:
        wait_until(self._is_ready, RECOVERY_S, what=lambda: f"ready after killing {self.killed[-1:]}")

    def is_quiet(self) -> bool:
        return all(is_quiet(self._served, name) for name in self.schedulers)

    def _is_ready(self) -> bool:
        states = [state_of(self._served, name) for name in self.schedulers]
        return self._served.is_ready() and all(state and state.worker_group == "READY" for state in states)


def state_of(served: Served, name: str) -> scheduler_pb2.GetStateResponse | None:
    with grpc.insecure_channel(served.deployment.address_of(name), options=CHANNEL_OPTIONS) as channel:
        try:
            return scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=10)
        except grpc.RpcError:
            return None


def is_quiet(served: Served, name: str) -> bool:
    """Whether a group holds nothing for requests, and has lost nothing."""
    state = state_of(served, name)
    if state is None:
        return False
    busy = state.running_rows + state.waiting_requests + state.disaggregation.open_leases
    return not busy + state.host_tier.open_transfers + state.leaked_pages and all(
        tier.protected_pages == 0 for tier in state.tiers
    )
