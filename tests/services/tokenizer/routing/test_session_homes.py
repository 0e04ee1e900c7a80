"""Sessions whose group computes prompts for now, while no other group generates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.types import GroupRole, RequestOptions, SessionTurn, SessionWish, Subject, View
from protos.gen.pando.v1 import scheduler_pb2
from services.tokenizer.routing.policies import RoundRobin
from tests.services.tokenizer.routing.requests import schedule
from tests.services.tokenizer.routing.test_fleet import GROUP_ROLES, Tier
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


async def test_turns_are_answered_by_a_home_that_prefills_also_if_no_group_generates(tmp_path: Path) -> None:
    prefill, decode = GROUP_ROLES
    tier = Tier(tmp_path, 2)
    for group in tier.groups:
        group.scheduler.load = scheduler_pb2.SchedulerLoad(serves=True, role=decode)
    views = [View(Subject("acme", f"user-{number}")) for number in range(16)]
    async with tier.run(RoundRobin()) as fleet:
        for view in views:
            await fleet.open_session(SessionWish(view, "chat"))
        home = tier.groups[0].scheduler
        users = sorted(name for name, _ in home.sessions)
        assert 0 < len(users) < len(views), "sessions are spread"
        signals = scheduler_pb2.RoleSignals(own_role=decode)
        home.load = scheduler_pb2.SchedulerLoad(serves=True, role=prefill, signals=signals)
        await until(lambda: fleet._replicas[tier.groups[0].address].role is GroupRole.PREFILL)
        await tier.groups[1].stop()
        await until(lambda: tier.serving(fleet) == 1)
        turn = RequestOptions(session="chat", turn=SessionTurn("next", after="last"))
        requests = [schedule(f"{user}-0", user=user) for user in users]
        fleet.submit([replace(request, options=turn) for request in requests])
        await until(lambda: len(tier.listener.admitted) == len(users))
        assert sorted(request.request_id for request in home.requests) == sorted(each.request_id for each in requests)
        for options in (RequestOptions(), RequestOptions(session="chat")):
            with pytest.raises(UnavailableError):
                fleet.submit([replace(schedule("other", user=users[0]), options=options)])
        # None of a batch is sent if some cannot be.
        with pytest.raises(UnavailableError):
            fleet.submit([replace(schedule("turn", user=users[0]), options=turn), schedule("other", user=users[0])])
        assert len(home.requests) == len(users)
