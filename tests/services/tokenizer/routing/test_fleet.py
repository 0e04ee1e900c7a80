"""Several scheduler groups behind one tokenizer: found, used, drained, lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import UnavailableError
from common.rpc.channel import open_channel
from common.rpc.discovery import Discovery
from common.rpc.peers import Servers, servers_at
from common.rpc.server import RpcServer
from common.rpc.sessions import SessionsService
from common.types import (
    EXPECTED_OUTPUT_TOKENS,
    GroupRole,
    RequestId,
    RequestOptions,
    SessionTurn,
    SessionWish,
    Subject,
    View,
)
from common.wire.requests import load_from_wire
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc, sessions_pb2_grpc
from services.tokenizer.routing import fleet as routing_fleet
from services.tokenizer.routing.fleet import Fleet
from services.tokenizer.routing.policies import LOAD_FACTOR, PrefixAware, RoundRobin
from tests.fakes.scheduler import FakeScheduler
from tests.services.tokenizer.routing.requests import schedule
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from common.types import Admission, LoadReport
    from services.tokenizer.routing.policies import RoutingPolicy


class LoadedScheduler(FakeScheduler):
    """Also says how much it has to do."""

    waiting = 0
    polls = 0

    async def GetState(self, request: scheduler_pb2.GetStateRequest, context: Any) -> scheduler_pb2.GetStateResponse:
        self.polls += 1
        return scheduler_pb2.GetStateResponse(waiting_requests=self.waiting)


class Group:
    """One group at an address that it can leave and come back to."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.scheduler = LoadedScheduler()  # type: ignore[abstract]  # the generated base answers what it doesn't
        self._server: RpcServer | None = None

    @property
    def names(self) -> list[str]:
        return [request.request_id for request in self.scheduler.requests]

    async def start(self) -> None:
        self._server = RpcServer("pando.v1.Scheduler", self.address)
        self._server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self.scheduler)
        self._server.add(sessions_pb2_grpc.add_SessionsServicer_to_server, SessionsService(self.scheduler))
        await self._server.start()
        await self._server.set_serving(True)

    async def drain(self) -> None:
        assert self._server is not None
        await self._server.set_serving(False)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


class Listener:
    """What the relay would hear."""

    def __init__(self) -> None:
        self.admitted: list[str] = []
        self.lost: set[str] = set()

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        self.admitted.extend(admission.request_id for admission in admissions)

    def on_load(self, load: LoadReport) -> None:
        raise AssertionError("a fleet keeps loads to itself")

    def on_scheduler_lost(self, lost: Iterable[RequestId] | None = None) -> None:
        assert lost is not None, "a fleet knows who was sent what"
        self.lost.update(lost)


class Tier:
    """A fleet over groups that the test starts and stops."""

    def __init__(self, folder: Path, groups: int, max_destinations: int = 100) -> None:
        self._max_destinations = max_destinations
        self.role_settle_s = 15.0
        self.groups = [Group(f"unix:{folder}/{index}.sock") for index in range(groups)]
        self.configured = [group.address for group in self.groups]
        self.listener = Listener()
        # Instead of those at the addresses.
        self.servers: Servers | None = None

    def submit(self, fleet: Fleet, *users: str) -> None:
        fleet.submit([schedule(f"{user}-{index}", user=user) for index, user in enumerate(users)])

    def have_reported(self, fleet: Fleet) -> bool:
        """Whether the fleet knows the latest loads of all groups."""
        replicas = [fleet._replicas[group.address] for group in self.groups]
        loads = [load_from_wire(group.scheduler.load) for group in self.groups if group.scheduler.load is not None]
        return all(
            (replica._is_serving, replica.role, replica._signals) == (load.serves, load.role, load.signals)
            for replica, load in zip(replicas, loads, strict=True)
        )

    def serving(self, fleet: Fleet) -> int:
        return sum(replica.can_serve for replica in fleet._replicas.values())

    @asynccontextmanager
    async def run(self, policy: RoutingPolicy) -> AsyncIterator[Fleet]:
        for group in self.groups:
            await group.start()
        fleet = Fleet(
            self.servers or servers_at(self.configured),
            policy,
            discovery_interval_s=0.05,
            max_destinations=self._max_destinations,
            role_settle_s=self.role_settle_s,
        )
        running = asyncio.create_task(fleet.run(self.listener))
        try:
            await until(lambda: self.serving(fleet) == len(self.groups))
            yield fleet
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for group in self.groups:
                await group.stop()


async def test_a_prefill_group_that_is_found_by_a_name_is_named_with_it(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    roles = (scheduler_pb2.SCHEDULER_ROLE_PREFILL, scheduler_pb2.SCHEDULER_ROLE_DECODE)
    for group, role in zip(tier.groups, roles, strict=True):
        group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True, role=role)
    sockets = {f"10.0.0.{index}:50052": group.address for index, group in enumerate(tier.groups)}

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("schedulers", 50052)
        return list(sockets)

    tier.servers = Servers(
        Discovery(["dns:schedulers:50052"], resolve), lambda found: open_channel(sockets[found.address])
    )
    async with tier.run(RoundRobin()) as fleet:
        await until(lambda: any(replica.role is GroupRole.PREFILL for replica in fleet._replicas.values()))
        tier.submit(fleet, "a")
        await until(lambda: len(tier.listener.admitted) == 1)
    [sent] = tier.groups[1].scheduler.requests
    assert (sent.prefill_group, sent.prefill_group_name) == ("10.0.0.0:50052", "schedulers")


async def test_requests_are_spread_and_answers_come_back(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(RoundRobin()) as fleet:
        tier.submit(fleet, "a", "b", "c", "d")
        await until(lambda: len(tier.listener.admitted) == 4)
        assert [len(group.names) for group in tier.groups] == [2, 2]


async def test_a_users_requests_stay_with_one_group(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with tier.run(PrefixAware(100)) as fleet:
        for _ in range(5):
            tier.submit(fleet, "ann", "bob", "cid", "dee", "eve", "fay")
        await until(lambda: len(tier.listener.admitted) == 30)
        homes = Counter(name.partition("-")[0] for group in tier.groups for name in set(group.names))
        assert set(homes.values()) == {1}


async def test_a_group_that_drains_gets_nothing_new_and_its_users_move(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(PrefixAware(100)) as fleet:
        await tier.groups[0].drain()
        await until(lambda: tier.serving(fleet) == 1)
        tier.submit(fleet, *"abcdefgh")
        await until(lambda: len(tier.listener.admitted) == 8)
        assert [len(group.names) for group in tier.groups] == [0, 8]
        assert tier.listener.lost == set()


async def test_each_group_is_informed_whether_another_one_would_serve(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(RoundRobin()) as fleet:
        schedulers = [group.scheduler for group in tier.groups]
        await until(lambda: all(scheduler.others_serve for scheduler in schedulers))
        await tier.groups[0].drain()
        await until(lambda: tier.serving(fleet) == 1)
        await until(lambda: [scheduler.others_serve for scheduler in schedulers] == [True, False])


async def test_a_dead_group_loses_only_its_unanswered_requests(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(RoundRobin()) as fleet:
        for group in tier.groups:
            group.scheduler.answers = False
        tier.submit(fleet, "a", "b", "c", "d")
        await until(lambda: all(len(group.names) == 2 for group in tier.groups))
        dying = set(tier.groups[0].names)
        await tier.groups[0].stop()
        await until(lambda: tier.listener.lost)
        assert tier.listener.lost == dying
        tier.submit(fleet, "e", "f")
        await until(lambda: len(tier.groups[1].names) == 4)


async def test_a_group_that_comes_back_is_used_again(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(RoundRobin()) as fleet:
        await tier.groups[0].stop()
        await until(lambda: tier.serving(fleet) == 1)
        await tier.groups[0].start()
        await until(lambda: tier.serving(fleet) == 2)
        tier.submit(fleet, "a", "b")
        await until(lambda: len(tier.groups[0].names) == 1)


async def test_groups_come_and_go_by_discovery(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(RoundRobin()) as fleet:
        removed = tier.configured.pop()
        await until(lambda: len(fleet._replicas) == 1)
        tier.submit(fleet, "a", "b")
        await until(lambda: len(tier.groups[0].names) == 2)
        tier.configured.append(removed)
        await until(lambda: tier.serving(fleet) == 2)


async def test_the_load_of_a_group_of_an_earlier_version_is_polled_and_affects_the_routing(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    tier.groups[0].scheduler.waiting = 50
    async with tier.run(PrefixAware(1.25)) as fleet:
        await until(lambda: max(replica.load for replica in fleet._replicas.values()) == 50)
        tier.submit(fleet, *"abcdefgh")
        await until(lambda: len(tier.listener.admitted) == 8)
        assert [len(group.names) for group in tier.groups] == [0, 8]


async def test_groups_that_report_their_load_are_not_polled(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    for group, waiting in zip(tier.groups, (50, 0), strict=True):
        group.scheduler.load = scheduler_pb2.SchedulerLoad(open_choices=waiting, serves=True)
    async with tier.run(PrefixAware(1.25)) as fleet:
        await until(lambda: all(replica._link.reports_load for replica in fleet._replicas.values()))
        polled = [group.scheduler.polls for group in tier.groups]
        assert [replica.load for replica in fleet._replicas.values()] == [50, 0]
        tier.submit(fleet, *"abcdefgh")
        await until(lambda: len(tier.listener.admitted) == 8)
        assert [len(group.names) for group in tier.groups] == [0, 8]
        # The other one's admissions came with its load, in which they are included.
        tier.groups[0].scheduler.load = scheduler_pb2.SchedulerLoad(open_choices=7, serves=True)
        await until(lambda: [replica.load for replica in fleet._replicas.values()] == [7, 0])
        assert [group.scheduler.polls for group in tier.groups] == polled


async def test_requests_that_a_report_cannot_include_count_until_their_admission(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 1)
    scheduler = tier.groups[0].scheduler
    scheduler.load = scheduler_pb2.SchedulerLoad(open_choices=5, serves=True)
    scheduler.answers = False
    async with tier.run(RoundRobin()) as fleet:
        [replica] = fleet._replicas.values()
        tier.submit(fleet, *"abc")
        assert replica.load == 8
        await until(lambda: len(scheduler.requests) == 3)
        scheduler.load = scheduler_pb2.SchedulerLoad(open_choices=6, serves=True)
        await until(lambda: replica.load == 9)


async def test_a_full_group_gets_nothing_while_another_has_room_and_all_are_used_once_none_has(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    for group in tier.groups:
        # As the group would report it without having got anything else.
        group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True, free_tokens=1000)
        group.scheduler.answers = False
    # Three ids, and the usual output.
    needed = 3 + EXPECTED_OUTPUT_TOKENS
    async with tier.run(PrefixAware(LOAD_FACTOR)) as fleet:
        replicas = [fleet._replicas[group.address] for group in tier.groups]
        await until(lambda: [replica.free_tokens for replica in replicas] == [1000, 1000])
        # Equal beginnings have one favourite, which has room for one of them; then neither has room for another.
        fleet.submit([schedule("0")])
        [home] = [replica for replica in replicas if replica.free_tokens == 1000 - needed]
        [other] = [replica for replica in replicas if replica is not home]
        fleet.submit([schedule("1")])
        assert (home.load, other.load) == (1, 1)
        fleet.submit([schedule("2"), schedule("3")])
        assert (home.load, other.load) == (3, 1)
        # What a report cannot include counts until the admission.
        assert home.free_tokens == 1000 - 3 * needed
        other_group = tier.groups[replicas.index(other)].scheduler
        other_group.load = scheduler_pb2.SchedulerLoad(serves=True, open_choices=1, free_tokens=5 * needed)
        await until(lambda: other.free_tokens == 4 * needed)
        # Divided before any report, as long as there is room.
        fleet.submit([schedule(f"{number}") for number in range(4, 9)])
        assert other.free_tokens == 0
        assert home.load == 4


async def test_a_group_is_asked_to_change_its_role_when_the_load_calls_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_fleet, "ROLE_INTERVAL_S", 0.02)
    tier = Tier(tmp_path, 4)
    tier.role_settle_s = 0.2
    prefill, decode = scheduler_pb2.SCHEDULER_ROLE_PREFILL, scheduler_pb2.SCHEDULER_ROLE_DECODE
    for number, group in enumerate(tier.groups):
        is_short = number < 2
        role = prefill if is_short else decode
        signals = scheduler_pb2.RoleSignals(
            may_change=True, waited_ms=2000 * is_short, fullness=0.1, own_role=role, follows_load=True
        )
        group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True, open_choices=1, role=role, signals=signals)
    async with tier.run(PrefixAware(LOAD_FACTOR)):
        last = tier.groups[3].scheduler
        await until(lambda: last.wishes)
        assert last.wishes[0].role == prefill
        assert "prefill groups: " in last.wishes[0].reason
        assert not any(group.scheduler.wishes for group in tier.groups[:3])


async def test_the_room_of_a_group_is_unknown_once_it_is_lost(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 1)
    tier.groups[0].scheduler.load = scheduler_pb2.SchedulerLoad(serves=True, free_tokens=5)
    async with tier.run(RoundRobin()) as fleet:
        [replica] = fleet._replicas.values()
        await until(lambda: replica.free_tokens == 5)
        await tier.groups[0].stop()
        await until(lambda: replica.free_tokens is None)


async def test_a_group_that_reports_that_it_serves_nothing_gets_nothing(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    for group in tier.groups:
        group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True)
    async with tier.run(RoundRobin()) as fleet:
        tier.groups[0].scheduler.load = scheduler_pb2.SchedulerLoad(serves=False)
        await until(lambda: tier.serving(fleet) == 1)
        tier.submit(fleet, *"abcd")
        await until(lambda: len(tier.listener.admitted) == 4)
        assert [len(group.names) for group in tier.groups] == [0, 4]


async def test_a_group_that_sleeps_gets_requests_only_if_no_other_one_serves(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    for group in tier.groups:
        group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True)
    async with tier.run(RoundRobin()) as fleet:
        tier.groups[0].scheduler.load = scheduler_pb2.SchedulerLoad(sleeps=True)
        await until(lambda: tier.serving(fleet) == 1)
        tier.submit(fleet, *"abcd")
        await until(lambda: len(tier.listener.admitted) == 4)
        assert [len(group.names) for group in tier.groups] == [0, 4]
        tier.groups[1].scheduler.load = scheduler_pb2.SchedulerLoad(serves=False)
        await until(lambda: tier.serving(fleet) == 0)
        assert await fleet.can_serve()
        tier.submit(fleet, *"ef")
        await until(lambda: len(tier.listener.admitted) == 6)
        assert [len(group.names) for group in tier.groups] == [2, 4]


async def test_a_group_that_answers_no_heartbeats_gets_nothing_until_it_does_again(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    for group in tier.groups:
        group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True)
    async with tier.run(RoundRobin()) as fleet:
        tier.groups[0].scheduler.is_silent = True
        await until(lambda: tier.serving(fleet) == 1)
        tier.submit(fleet, *"abcd")
        await until(lambda: len(tier.listener.admitted) == 4)
        assert [len(group.names) for group in tier.groups] == [0, 4]
        tier.groups[0].scheduler.is_silent = False
        await until(lambda: tier.serving(fleet) == 2)


async def test_without_a_serving_group_requests_are_refused_as_unavailable(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 1)
    async with tier.run(RoundRobin()) as fleet:
        await tier.groups[0].stop()
        await until(lambda: tier.serving(fleet) == 0)
        assert not await fleet.can_serve()
        with pytest.raises(UnavailableError):
            tier.submit(fleet, "a")


async def test_an_abort_goes_only_to_the_group_of_its_request(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with tier.run(RoundRobin()) as fleet:
        tier.submit(fleet, *"abcdef")
        await until(lambda: len(tier.listener.admitted) == 6)
        owned = [list(group.names) for group in tier.groups]
        assert [len(names) for names in owned] == [2, 2, 2]
        fleet.abort([RequestId(names[0]) for names in owned])
        await until(lambda: sum(len(group.scheduler.aborts) for group in tier.groups) >= 3)
        # A later message on the same stream shows that nothing else was sent before it.
        tier.submit(fleet, *"uvw")
        await until(lambda: all(len(group.names) == 3 for group in tier.groups))
        assert [group.scheduler.aborts for group in tier.groups] == [[names[0]] for names in owned]


async def test_the_abort_of_an_unknown_request_goes_to_all_groups(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with tier.run(RoundRobin()) as fleet:
        fleet.abort([RequestId("of-another-tokenizer")])
        await until(lambda: all(group.scheduler.aborts == ["of-another-tokenizer"] for group in tier.groups))


async def test_the_abort_of_a_request_that_is_no_longer_remembered_goes_to_all_groups(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2, max_destinations=2)
    async with tier.run(RoundRobin()) as fleet:
        tier.submit(fleet, "a", "b", "c")
        await until(lambda: len(tier.listener.admitted) == 3)
        fleet.abort([RequestId("a-0"), RequestId("c-2")])
        await until(lambda: all("a-0" in group.scheduler.aborts for group in tier.groups))
        assert sorted(name for group in tier.groups for name in group.scheduler.aborts) == ["a-0", "a-0", "c-2"]


async def test_the_abort_of_a_request_whose_group_is_away_waits_for_this_group(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(RoundRobin()) as fleet:
        tier.submit(fleet, "a", "b")
        await until(lambda: len(tier.listener.admitted) == 2)
        [lost] = tier.groups[0].names
        await tier.groups[0].stop()
        await until(lambda: tier.serving(fleet) == 1)
        fleet.abort([RequestId(lost)])
        await tier.groups[0].start()
        await until(lambda: tier.groups[0].scheduler.aborts == [lost])
        assert tier.groups[1].scheduler.aborts == []


async def test_the_abort_of_a_request_that_was_submitted_again_goes_to_its_latest_group(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with tier.run(RoundRobin()) as fleet:
        tier.submit(fleet, "a")
        await until(lambda: len(tier.listener.admitted) == 1)
        first = next(group for group in tier.groups if group.names)
        await first.stop()
        await until(lambda: tier.serving(fleet) == 1)
        tier.submit(fleet, "a")
        second = next(group for group in tier.groups if group is not first)
        await until(lambda: second.names == ["a-0"])
        fleet.abort([RequestId("a-0")])
        await until(lambda: second.scheduler.aborts == ["a-0"])
        await first.start()
        await until(lambda: tier.serving(fleet) == 2)
        assert first.scheduler.aborts == []


async def test_a_session_s_requests_go_where_it_is_open_however_much_that_group_has_to_do(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with tier.run(RoundRobin()) as fleet:
        # Sessions are placed by the groups' addresses, whose ports are random: none of so many leaves a group out.
        users = [View(Subject("acme", f"user-{number}")) for number in range(48)]
        for user in users:
            assert (await fleet.open_session(SessionWish(user, "chat"))).capacity_tokens == 96
        assert all(group.scheduler.sessions for group in tier.groups), "sessions are spread"
        for number in range(3):
            requests = [schedule(f"{user.subject.name}-{number}", user=user.subject.name) for user in users]
            fleet.submit([replace(request, options=RequestOptions(session="chat")) for request in requests])
        await until(lambda: len(tier.listener.admitted) == 3 * len(users))
        for group in tier.groups:
            assert {request.view.subject.name for request in group.scheduler.requests} == {
                user for user, _ in group.scheduler.sessions
            }
        assert await fleet.close_session(users[0], "chat")
        assert not await fleet.close_session(users[0], "chat")


GROUP_ROLES = scheduler_pb2.SCHEDULER_ROLE_PREFILL, scheduler_pb2.SCHEDULER_ROLE_DECODE


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 6))])
async def test_no_change_of_roles_moves_a_session_or_sends_one_of_its_turns_elsewhere(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    prefill, decode = GROUP_ROLES
    tier = Tier(tmp_path, 5)
    own = [decode, decode, decode, prefill, prefill]

    def become(index: int, role: scheduler_pb2.SchedulerRole.ValueType, *, is_changing: bool) -> None:
        scheduler = tier.groups[index].scheduler
        signals = scheduler_pb2.RoleSignals(is_changing=is_changing, own_role=own[index], follows_load=True)
        scheduler.load = scheduler_pb2.SchedulerLoad(serves=not is_changing, role=role, signals=signals)

    for index, role in enumerate(own):
        become(index, role, is_changing=False)
    opened: dict[View, str] = {}
    turns = 0
    async with tier.run(RoundRobin()) as fleet:
        for step in range(12):
            roles = [prefill if index else decode for index in range(5)]
            for index in random.sample(range(1, 5), random.randint(0, 4)):
                roles[index] = decode
            changing = random.randrange(1, 5) if random.random() < 0.5 else None
            for index, role in enumerate(roles):
                become(index, role, is_changing=index == changing)
            await until(lambda: tier.have_reported(fleet))
            for number in range(4):
                view = View(Subject("acme", f"user-{step}-{number}"))
                await fleet.open_session(SessionWish(view, "chat"))
                opened[view] = next(
                    group.address
                    for group in tier.groups
                    if any(user == view.subject.name for user, _ in group.scheduler.sessions)
                )
            for view, home in opened.items():
                options = RequestOptions(session="chat", turn=SessionTurn("next", after="last"))
                request = schedule(f"turn-{turns}", user=view.subject.name)
                fleet.submit([replace(request, options=options)])
                assert fleet._destinations.take(request.request_id) == home
                turns += 1
        for view in opened:
            assert await fleet.close_session(view, "chat")
        assert not any(group.scheduler.sessions for group in tier.groups)
    assert turns == sum(4 * (step + 1) for step in range(12))
    assert len(set(opened.values())) == own.count(decode)


async def test_other_requests_of_a_session_go_to_its_home_or_have_their_prefix_read_from_it(tmp_path: Path) -> None:
    prefill, decode = GROUP_ROLES
    tier = Tier(tmp_path, 4)
    own = [decode, decode, prefill, prefill]

    def report(roles: list[scheduler_pb2.SchedulerRole.ValueType]) -> None:
        for index, (group, role) in enumerate(zip(tier.groups, roles, strict=True)):
            signals = scheduler_pb2.RoleSignals(own_role=own[index])
            group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True, role=role, signals=signals)

    report(own)
    users = [View(Subject("acme", f"user-{number}")) for number in range(24)]
    async with tier.run(RoundRobin()) as fleet:
        for user in users:
            await fleet.open_session(SessionWish(user, "chat"))
        homes = {
            user.subject.name: group.address
            for group in tier.groups
            for user in users
            if any(name == user.subject.name for name, _ in group.scheduler.sessions)
        }
        assert len(set(homes.values())) == 2, "sessions are spread"
        # One that has prefilled generates now, and one that has generated prefills.
        report([decode, prefill, decode, prefill])
        await until(lambda: tier.have_reported(fleet))
        former = tier.groups[1].address
        requests = [schedule(f"{user.subject.name}-0", user=user.subject.name) for user in users]
        fleet.submit([replace(request, options=RequestOptions(session="chat")) for request in requests])
        await until(lambda: len(tier.listener.admitted) == len(users))
        for group in tier.groups:
            for request in group.scheduler.requests:
                home = homes[request.view.subject.name]
                assert request.prefill_group == former if home == former else group.address == home
        assert not tier.groups[1].scheduler.requests
        assert not tier.groups[3].scheduler.requests


async def test_without_groups_no_session_opens(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 1)
    async with tier.run(RoundRobin()) as fleet:
        await tier.groups[0].drain()
        await until(lambda: tier.serving(fleet) == 0)
        with pytest.raises(UnavailableError):
            await fleet.open_session(SessionWish(View(Subject("acme", "ann")), "chat"))
