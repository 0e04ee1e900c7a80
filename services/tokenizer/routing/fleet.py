"""All scheduler groups, each with its stream, health and load, and the distribution of requests to them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from common.rpc.status import answered
from common.types import GroupRole
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.tokenizer import metrics
from services.tokenizer.routing.policies import (
    RoutingCandidate,
    affinity_key,
    expected_tokens,
    favourite,
    session_key,
    with_room,
)
from services.tokenizer.routing.roles import ObservedGroup, RoleController
from services.tokenizer.routing.session_search import SessionSearch
from services.tokenizer.routing.shared_prefixes import NoSharedPrefixes
from services.tokenizer.scheduler_link import SchedulerLink

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import grpc

    from common.rpc.peers import Servers
    from common.types import (
        Admission,
        LoadReport,
        RequestId,
        RoleSignals,
        RoleWish,
        ScheduleRequest,
        SessionGrant,
        SessionWish,
        View,
    )
    from services.tokenizer.routing.policies import RoutingPolicy
    from services.tokenizer.routing.shared_prefixes import SharedPrefixes
    from services.tokenizer.scheduler_link import SchedulerListener

DISCOVERY_INTERVAL_S = 2.0
WATCH_INTERVAL_S = 0.25
STATE_TIMEOUT_S = 2.0
# Between decisions whether groups change their roles, and after a change, so that its effect is seen before the next.
ROLE_INTERVAL_S = 0.5
ROLE_SETTLE_S = 15.0
# A group that has been away for so many seconds counts as gone, and its sessions with it.
GONE_S = 60.0
RETRY_AFTER_MS = 1000
# Between updates of the metrics of a group that reports its load.
MEASURE_INTERVAL_S = 1.0
# Requests whose group is remembered, finished ones included: about 30 MB.
MAX_DESTINATIONS = 131_072


class Fleet:
    """Sends each request to a group that would serve it now, and its abort to the same group.

    It does not learn when requests end, so it remembers the groups of the latest ones only. Aborts of others, for
    example those sent by another tokenizer, go to every group: they name exact ids, and groups ignore unknown ones.
    """

    def __init__(
        self,
        servers: Servers,
        policy: RoutingPolicy,
        discovery_interval_s: float = DISCOVERY_INTERVAL_S,
        prefixes: SharedPrefixes | None = None,
        max_destinations: int = MAX_DESTINATIONS,
        role_settle_s: float = ROLE_SETTLE_S,
    ) -> None:
        """`servers` are the groups' schedulers, `policy` selects a group for each request.

        `prefixes` are those that the groups share; by default each group decides alone. The groups of the latest
        `max_destinations` requests are remembered. No role is changed within `role_settle_s` of another change.
        """
        self._servers = servers
        self._policy = policy
        self._discovery_interval_s = discovery_interval_s
        self._prefixes = prefixes or NoSharedPrefixes()
        self._replicas: dict[str, Replica] = {}
        self._destinations = Destinations(max_destinations)
        self._roles = RoleController(role_settle_s)
        self._search = SessionSearch(self)
        self._log = get_logger("fleet")

    async def can_serve(self) -> bool:
        """Whether any group would serve a request now, or once it is woken."""
        return bool(self._serving())

    def submit(self, requests: Sequence[ScheduleRequest]) -> None:
        """Send all requests or none, each to its group.

        Turns of sessions that are not at the most likely group are sent on when that has refused them.

        Raises:
            UnavailableError: no group accepts them.
        """
        marked = [_in_session(request) for request in requests]
        self._send(marked)
        self._search.note(marked)

    def _send(self, requests: Sequence[ScheduleRequest]) -> None:
        away: set[str] = set()
        sent: list[RequestId] = []
        waiting = list(requests)
        while waiting:
            refused: list[ScheduleRequest] = []
            for name, batch in self._assign(waiting, away, sent).items():
                try:
                    self._replicas[name].submit(batch)
                    sent.extend(request.request_id for request in batch)
                    self._destinations.note(name, batch)
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
        """Close a session, at all groups that have it; return whether it was open.

        There are several if it was opened again while its group was away.

        Raises:
            PandoError: its group is unavailable, or a group that may have it does not answer.
        """
        likely = self._home_of(view, session)
        was_open = await likely.close_session(view, session)
        found, is_certain = await self._find(view, session, None, likely.name)
        for home in found:
            was_open = await self._replica(home).close_session(view, session) or was_open
        if not was_open and not is_certain:
            raise _may_be_away()
        return was_open

    async def find_session(self, view: View, session: str, after: str | None = None) -> bool:
        """Return whether a session is open at a group, and has the turn `after` if that is not None.

        Raises:
            PandoError: a group that may have it does not answer.
        """
        return await self.find_home(view, session, after) is not None

    async def find_home(self, view: View, session: str, after: str | None, lacking: str | None = None) -> str | None:
        """Return the group that has a session with the turn `after`, by asking all but `lacking`; None: none has.

        Raises:
            UnavailableError: a group that may have it does not answer.
        """
        found, is_certain = await self._find(view, session, after, lacking)
        if found:
            return favourite(session_key(view, session), found)
        if not is_certain:
            raise _may_be_away()
        return None

    async def _find(self, view: View, session: str, after: str | None, lacking: str | None) -> tuple[list[str], bool]:
        """Return the groups that have a session, and whether no other one can have it; all but `lacking` are asked."""
        asked = {name: replica for name, replica in self._replicas.items() if name != lacking}
        answers = await asyncio.gather(*(each.try_find_session(view, session, after) for each in asked.values()))
        found = [name for name, has_session in zip(asked, answers, strict=True) if has_session]
        silent = [each for each, has_session in zip(asked.values(), answers, strict=True) if has_session is None]
        return found, all(each.is_gone for each in silent)

    def send_home(self, home: str, request: ScheduleRequest) -> None:
        """Send a turn to the group that has its session.

        Raises:
            UnavailableError: that does not take it.
        """
        replica = self._replica(home)
        sent = request if replica.role is GroupRole.PREFILL else self._with_prefill_group(request, home)
        replica.submit([sent])
        self._destinations.note(home, [sent])

    def send_anywhere(self, request: ScheduleRequest) -> None:
        """Send a turn that needs no session.

        Raises:
            UnavailableError: no group takes it.
        """
        self._send([request])

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Abort each request in the group that it was sent to; in every group if this is not known."""
        aborts: dict[str, list[RequestId]] = defaultdict(list)
        aborted = list(request_ids)
        self._search.abort(aborted)
        for request_id in aborted:
            group = self._destinations.take(request_id)
            for name in self._replicas if group is None else (group,):
                aborts[name].append(request_id)
        for name, ids in aborts.items():
            # A group that has gone has lost its requests, too.
            if name in self._replicas:
                self._replicas[name].abort(ids)

    async def run(self, listener: SchedulerListener) -> None:
        """Keep streams to all groups open until cancelled; `listener` receives admissions and losses."""
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._search.run())
            tasks.create_task(self._compare())
            tasks.create_task(self._prefixes.run())
            tasks.create_task(self._follow_load())
            while True:
                found = {group.address: group for group in await self._servers.discovery.look()}
                for address in [address for address in found if address not in running]:
                    self._log.info("replica.found", replica=address)
                    channel, name = self._servers.connect(found[address]), found[address].name or ""
                    replica = self._replicas[address] = Replica(address, channel, name)
                    running[address] = tasks.create_task(replica.run(self._search.listening(address, listener)))
                for address in running.keys() - found.keys():
                    self._log.info("replica.gone", replica=address)
                    del self._replicas[address]
                    running.pop(address).cancel()
                await asyncio.sleep(self._discovery_interval_s)

    async def _compare(self) -> None:
        """Keep each group informed whether another one would serve requests."""
        while True:
            serving = {name for name, replica in self._serving().items() if replica.can_serve}
            for name, replica in self._replicas.items():
                replica.note_others(serve=len(serving) > (name in serving))
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _follow_load(self) -> None:
        """Ask for the changes of roles that the loads of the groups call for, of those whose roles may change by it."""
        while True:
            await asyncio.sleep(ROLE_INTERVAL_S)
            observed = [replica.observed for replica in self._replicas.values()]
            changes = self._roles.decide([group for group in observed if group is not None], time.monotonic())
            for change in changes:
                role, reason = change.wish.role.value, change.wish.reason
                self._log.info("role.wished", replica=change.name, role=role, reason=reason)
                metrics.ROLE_WISHES_TOTAL.labels(role).inc()
                self._replicas[change.name].wish_role(change.wish)

    def _assign(
        self, requests: Sequence[ScheduleRequest], away: set[str], sent: Sequence[RequestId]
    ) -> dict[str, list[ScheduleRequest]]:
        groups = {
            name: RoutingCandidate(name, replica.load, replica.free_tokens)
            for name, replica in self._serving(away).items()
        }
        homes = self._homes(away)
        batches: dict[str, list[ScheduleRequest]] = defaultdict(list)
        for request in requests:
            tokens = expected_tokens(request)
            session = request.options.session
            if session is not None and homes and (groups or request.options.turn is not None):
                chosen = self._group_of_session(request, session, groups, homes)
            elif not groups:
                self.abort(sent)
                raise _no_scheduler()
            else:
                roomy = with_room(list(groups.values()), tokens)
                chosen = self._policy.choose(affinity_key(request), roomy, self._prefixes.find(request))
            if chosen in groups:
                groups[chosen] = groups[chosen].after(tokens)
            is_prefill_group = self._replicas[chosen].role is GroupRole.PREFILL
            home = None if session is None else favourite(session_key(request.view, session), homes)
            batches[chosen].append(request if is_prefill_group else self._with_prefill_group(request, home))
        return batches

    def _group_of_session(
        self, request: ScheduleRequest, session: str, serving: Collection[str], homes: Collection[str]
    ) -> str:
        """Return the group for a request of a session, which may not be open; the groups' loads do not matter."""
        key = session_key(request.view, session)
        home = favourite(key, homes)
        # Only the home has the turns that another one continues, and it pins the pages of the others.
        if request.options.turn is not None or home in serving:
            return home
        return favourite(key, serving)

    def _with_prefill_group(self, request: ScheduleRequest, home: str | None) -> ScheduleRequest:
        """Name the group that is to compute the prompt if that is long: by cached prefixes and load, like any other.

        If the `home` of its session computes prompts by now, it is that group, as it has the session's pages.
        """
        groups = [
            RoutingCandidate(name, replica.load)
            for name, replica in self._replicas.items()
            if replica.can_serve and replica.role is GroupRole.PREFILL
        ]
        if not groups:
            return request
        with_pages = [each for each in groups if each.name == home]
        chosen = self._policy.choose(affinity_key(request), with_pages or groups, self._prefixes.find(request))
        self._replicas[chosen].note_prefill()
        return replace(request, prefill_group=chosen, prefill_group_name=self._replicas[chosen].certified_as)

    def _serving(self, away: Collection[str] = ()) -> dict[str, Replica]:
        """Return the groups that would serve a request now, without `away`; if there are none, those that sleep.

        Groups that only compute prompts for others do not serve. Requests wake a group, or wait for it to be woken,
        only if no other one serves.
        """
        there = {
            name: replica
            for name, replica in self._replicas.items()
            if replica.role is not GroupRole.PREFILL and name not in away
        }
        serving = {name: replica for name, replica in there.items() if replica.can_serve}
        return serving or {name: replica for name, replica in there.items() if replica.sleeps}

    def _homes(self, away: Collection[str] = ()) -> list[str]:
        """Return the groups at which sessions are open, without `away`: those that generate by their settings.

        Also one that computes prompts for now, or drains before it changes, so that no change of a role moves a
        session.
        """
        homes = [
            name
            for name, replica in self._replicas.items()
            if name not in away
            and replica.own_role is not GroupRole.PREFILL
            and (replica.can_serve or replica.is_changing)
        ]
        return homes or list(self._serving(away))

    def _home_of(self, view: View, session: str) -> Replica:
        homes = self._homes()
        if not homes:
            raise _no_scheduler()
        return self._replicas[favourite(session_key(view, session), homes)]

    def _replica(self, name: str) -> Replica:
        if name not in self._replicas:
            # It has gone while it was asked.
            raise _no_scheduler()
        return self._replicas[name]


class Destinations:
    """Remembers the groups to which the latest requests were sent."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: OrderedDict[RequestId, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def note(self, group: str, requests: Iterable[ScheduleRequest]) -> None:
        """Record the group of requests, and forget the oldest ones above the limit."""
        for request in requests:
            self._groups[request.request_id] = group
            self._groups.move_to_end(request.request_id)
        while len(self._groups) > self._limit:
            self._groups.popitem(last=False)

    def take(self, request_id: RequestId) -> str | None:
        """Forget a request and return its group; None if it is not remembered."""
        return self._groups.pop(request_id, None)


def _no_scheduler() -> UnavailableError:
    return UnavailableError("no scheduler would serve now", retry_after_ms=RETRY_AFTER_MS)


def _may_be_away() -> UnavailableError:
    message = "a group that may have this session does not answer; try again, or open another session"
    return UnavailableError(message, retry_after_ms=RETRY_AFTER_MS)


def _in_session(request: ScheduleRequest) -> ScheduleRequest:
    """Return a request that a group without its session refuses if it is a turn, so that it comes to its session."""
    turn = request.options.turn
    if turn is None:
        return request
    return replace(request, options=replace(request.options, turn=replace(turn, only_in_session=True)))


class Replica:
    """Sends requests to one group and tracks those that it has not answered."""

    def __init__(self, name: str, channel: grpc.aio.Channel, certified_as: str) -> None:
        """Use `channel` to reach the group `name`; the channel is closed when `run` ends.

        `certified_as` is the name that its certificate must have; empty: the address's host.
        """
        self.name = name
        self.certified_as = certified_as
        self._channel = channel
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)
        self._link = SchedulerLink(channel)
        self._listener: SchedulerListener | None = None
        self._is_serving = False
        self._is_sleeping = False
        self._role = self._own_role = GroupRole.BOTH
        self._lost_at = time.monotonic()
        self._signals: RoleSignals | None = None
        self._reported_load = 0
        self._reported_free_tokens: int | None = None
        # Requests that the latest report may not include, with the tokens that each is expected to need; without them,
        # a burst would go entirely to the group that was idle before. A report with an admission includes the admitted
        # request; answers to polls may not.
        self._unanswered: dict[RequestId, int] = {}
        self._unanswered_tokens = 0
        self._sent_since = 0
        self._others_serve = False

    @property
    def can_serve(self) -> bool:
        """Whether it accepts new requests; a draining group only finishes its open ones."""
        return self._is_serving and self._link.is_connected and not self._link.is_stale

    @property
    def role(self) -> GroupRole:
        """Role of the group, by its latest report."""
        return self._role

    @property
    def own_role(self) -> GroupRole:
        """Role of the group by its settings, as it has last reported it."""
        return self._own_role

    @property
    def is_gone(self) -> bool:
        """Whether it can have no sessions to come back with: it has been away for long, or has none by its settings."""
        is_away_long = not self._link.is_connected and time.monotonic() - self._lost_at >= GONE_S
        return is_away_long or self._own_role is GroupRole.PREFILL

    @property
    def is_changing(self) -> bool:
        """Whether its role is about to change, until when it takes turns of its sessions only."""
        return self._signals is not None and self._signals.is_changing and self._link.is_connected

    @property
    def observed(self) -> ObservedGroup | None:
        """The group as roles are decided by it; None: it neither serves nor changes its role."""
        if not self.can_serve and not self.is_changing:
            return None
        signals = self._signals if self._signals is not None and self._signals.follows_load else None
        return ObservedGroup(self.name, self._role, self._reported_load > 0, signals)

    @property
    def sleeps(self) -> bool:
        """Whether it accepts requests, which wait until its workers are woken."""
        return self._is_sleeping and self._link.is_connected and not self._link.is_stale

    @property
    def load(self) -> int:
        """Estimated number of open requests."""
        return self._reported_load + max(len(self._unanswered), self._sent_since)

    @property
    def free_tokens(self) -> int | None:
        """Estimated room for KV beside what open requests need, in tokens, may be negative; None: it reports none."""
        reported = self._reported_free_tokens
        return None if reported is None else reported - self._unanswered_tokens

    def submit(self, requests: Sequence[ScheduleRequest]) -> None:
        """Send requests.

        Raises:
            UnavailableError: the group is unavailable, or does not keep up.
        """
        self._link.submit(requests)
        self._sent_since += len(requests)
        for request in requests:
            self._forget_unanswered(request.request_id)
            self._unanswered[request.request_id] = tokens = expected_tokens(request)
            self._unanswered_tokens += tokens
        metrics.ROUTED_TOTAL.labels(self.name).inc(len(requests))

    def note_prefill(self) -> None:
        """Count a prompt that another group may have computed here, until the next report, which includes it if so."""
        self._sent_since += 1

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session here; see `SchedulerLink.open_session`."""
        return await self._link.open_session(wish)

    async def close_session(self, view: View, session: str) -> bool:
        """Close a session that was opened here; see `SchedulerLink.close_session`."""
        return await self._link.close_session(view, session)

    async def try_find_session(self, view: View, session: str, after: str | None) -> bool | None:
        """Return whether a session is open here; None: the group does not answer. See `SchedulerLink.find_session`."""
        if not self._link.is_connected or self._link.is_stale:
            return None
        try:
            return await self._link.find_session(view, session, after)
        except PandoError:
            return None

    def wish_role(self, wish: RoleWish) -> None:
        """Send a wish for another role."""
        self._link.wish_role(wish)

    def note_others(self, *, serve: bool) -> None:
        """Report to the group whether another one would serve requests now."""
        if serve != self._others_serve:
            self._others_serve = serve
            self._link.note_others(serve=serve)

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

    def on_load(self, load: LoadReport) -> None:
        """Use the group's report."""
        if load.serves != self._is_serving:
            metrics.REPLICA_SERVING.labels(self.name).set(load.serves)
        self._is_serving, self._is_sleeping, self._role = load.serves, load.sleeps, load.role
        self._reported_load, self._reported_free_tokens = load.open_choices, load.free_tokens
        self._signals = load.signals
        self._own_role = load.role if load.signals is None else load.signals.own_role
        self._sent_since = 0

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        """Pass the group's admissions to the listener."""
        known = list(admissions)
        for admission in known:
            self._forget_unanswered(admission.request_id)
        if self._listener is not None:
            self._listener.on_admissions(known)

    def on_scheduler_lost(self, lost: Iterable[RequestId] | None = None) -> None:
        """Report the requests that the group will not answer."""
        unanswered, self._unanswered, self._unanswered_tokens = self._unanswered, {}, 0
        self._is_serving = self._is_sleeping = False
        self._lost_at = time.monotonic()
        self._reported_free_tokens = self._signals = None
        if unanswered and self._listener is not None:
            self._listener.on_scheduler_lost(unanswered)

    def _forget_unanswered(self, request_id: RequestId) -> None:
        self._unanswered_tokens -= self._unanswered.pop(request_id, 0)

    async def _watch(self) -> None:
        """Poll a scheduler that does not report its load, which is of an earlier version."""
        while True:
            if not self._link.reports_load:
                self._is_serving = await self._link.can_serve()
                if self._is_serving and not self._link.reports_load:
                    await self._read_load()
            metrics.REPLICA_SERVING.labels(self.name).set(self.can_serve)
            await asyncio.sleep(MEASURE_INTERVAL_S if self._link.reports_load else WATCH_INTERVAL_S)

    async def _read_load(self) -> None:
        sent_before = self._sent_since
        try:
            state = await answered(self._stub.GetState(scheduler_pb2.GetStateRequest(), timeout=STATE_TIMEOUT_S))
        except PandoError:
            return
        if not self._link.reports_load:
            self._reported_load = state.waiting_requests + state.running_rows
            self._sent_since -= sent_before
