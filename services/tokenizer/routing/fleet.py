"""All scheduler groups, and the distribution of requests to them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

from common.errors import UnavailableError
from common.logs import get_logger
from services.tokenizer.routing.policies import RoutingCandidate, affinity_key, favourite, session_key
from services.tokenizer.routing.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import grpc

    from common.rpc.discovery import Discovery, Found
    from common.types import RequestId, ScheduleRequest, SessionGrant, SessionWish, View
    from services.tokenizer.routing.policies import RoutingPolicy
    from services.tokenizer.scheduler_link import SchedulerListener

DISCOVERY_INTERVAL_S = 2.0


class Fleet:
    """Sends each request to a group that would serve it now.

    It does not track requests after their admission. So aborts go to every group: they name exact ids, and groups
    ignore unknown ones.
    """

    def __init__(
        self,
        discovery: Discovery,
        connect: Callable[[Found], grpc.aio.Channel],
        policy: RoutingPolicy,
        discovery_interval_s: float = DISCOVERY_INTERVAL_S,
    ) -> None:
        """`discovery` finds groups, `connect` opens channels to them, `policy` selects one for each request."""
        self._discovery = discovery
        self._connect = connect
        self._policy = policy
        self._discovery_interval_s = discovery_interval_s
        self._replicas: dict[str, Replica] = {}
        self._log = get_logger("fleet")

    async def can_serve(self) -> bool:
        """Whether any group would serve a request now."""
        return any(replica.can_serve for replica in self._replicas.values())

    def submit(self, requests: Sequence[ScheduleRequest]) -> None:
        """Send all requests or none, each to its group.

        Raises:
            UnavailableError: no group accepts them.
        """
        away: set[str] = set()
        sent: list[RequestId] = []
        waiting = list(requests)
        while waiting:
            refused: list[ScheduleRequest] = []
            for name, batch in self._assign(waiting, away, sent).items():
                try:
                    self._replicas[name].submit(batch)
                    sent.extend(request.request_id for request in batch)
                except UnavailableError:
                    away.add(name)
                    refused.extend(batch)
            waiting = refused

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session at the group that gets all its requests.

        Raises:
            PandoError: that group refuses it, or no group would serve now.
        """
        return await self._home_of(wish.view, wish.session).open_session(wish)

    async def close_session(self, view: View, session: str) -> bool:
        """Close a session; return whether it was open.

        Raises:
            PandoError: its group is unavailable.
        """
        return await self._home_of(view, session).close_session(view, session)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Abort requests in every group."""
        ids = list(request_ids)
        for replica in self._replicas.values():
            replica.abort(ids)

    async def run(self, listener: SchedulerListener) -> None:
        """Keep streams to all groups open until cancelled; `listener` receives admissions and losses."""
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                found = {group.address: group for group in await self._discovery.look()}
                for address in [address for address in found if address not in running]:
                    self._log.info("replica.found", replica=address)
                    replica = self._replicas[address] = Replica(address, self._connect(found[address]))
                    running[address] = tasks.create_task(replica.run(listener))
                for address in running.keys() - found.keys():
                    self._log.info("replica.gone", replica=address)
                    del self._replicas[address]
                    running.pop(address).cancel()
                await asyncio.sleep(self._discovery_interval_s)

    def _assign(
        self, requests: Sequence[ScheduleRequest], away: set[str], sent: Sequence[RequestId]
    ) -> dict[str, list[ScheduleRequest]]:
        loads = {name: r.load for name, r in self._replicas.items() if r.can_serve and name not in away}
        if not loads:
            self.abort(sent)
            raise _no_scheduler()
        batches: dict[str, list[ScheduleRequest]] = defaultdict(list)
        for request in requests:
            if request.options.session is not None:
                # Only this group has the session's state, so its load does not matter.
                chosen = favourite(session_key(request.view, request.options.session), loads)
            else:
                candidates = [RoutingCandidate(name, load) for name, load in loads.items()]
                chosen = self._policy.choose(affinity_key(request), candidates)
            loads[chosen] += 1
            batches[chosen].append(request)
        return batches

    def _home_of(self, view: View, session: str) -> Replica:
        serving = [name for name, replica in self._replicas.items() if replica.can_serve]
        if not serving:
            raise _no_scheduler()
        return self._replicas[favourite(session_key(view, session), serving)]


def _no_scheduler() -> UnavailableError:
    return UnavailableError("no scheduler would serve now", retry_after_ms=1000)
