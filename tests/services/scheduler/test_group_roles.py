"""The role of a group changes by the load one change at a time, after a drain, and not while sessions are open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.audit.log import NoAudit
from common.rpc.sessions import SessionsClient
from common.settings.scheduler import AutomaticRoleSettings
from common.types import GroupRole, RoleSignals, RoleWish, SessionWish, Subject, View
from protos.gen.pando.v1 import scheduler_pb2
from services.scheduler.group_roles import GroupRoles
from services.scheduler.metrics import ROLE_CHANGES_TOTAL
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.scheduler.core.session_requests import RULES
from tests.services.scheduler.pipeline import ADMIN, PROMPT, Pipeline
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BOTH, PREFILL, DECODE = GroupRole.BOTH, GroupRole.PREFILL, GroupRole.DECODE


class Desk:
    """Roles by a clock that the test sets."""

    def __init__(self, role: GroupRole = DECODE, *, enabled: bool = True) -> None:
        self.now = 0.0
        rules = AutomaticRoleSettings(enabled=enabled, interval_s=60, drain_s=30)
        self.roles = GroupRoles(role, rules, lambda: self.now, NoAudit())
        self.harness = Harness(max_rows=2, pages=32)

    def wish(self, role: GroupRole) -> bool:
        return self.roles.wish(RoleWish(role, "a test"), self.harness.core)

    def signals(self) -> RoleSignals:
        signals = self.roles.signals(self.harness.core)
        assert signals is not None
        return signals

    def submit(self, name: str, length: int = 8, max_tokens: int = 8) -> None:
        request = make_request(name, [ord(name)] * length, max_tokens=max_tokens)
        assert self.harness.core.submit(request, self.now).rejected is None


def test_a_wish_is_followed_once_the_group_is_idle() -> None:
    desk = Desk()
    before = ROLE_CHANGES_TOTAL.labels("prefill", "load")._value.get()
    assert desk.wish(PREFILL)
    desk.roles.advance(is_idle=False)
    assert (desk.roles.role, desk.roles.is_changing) == (DECODE, True)
    desk.roles.advance(is_idle=True)
    assert (desk.roles.role, desk.roles.is_changing) == (PREFILL, False)
    assert ROLE_CHANGES_TOTAL.labels("prefill", "load")._value.get() == before + 1


def test_a_group_that_does_not_become_idle_changes_after_the_time_to_drain() -> None:
    desk = Desk()
    assert desk.wish(PREFILL)
    desk.now = 29.9
    desk.roles.advance(is_idle=False)
    assert desk.roles.role is DECODE
    desk.now = 30.0
    desk.roles.advance(is_idle=False)
    assert desk.roles.role is PREFILL


def test_the_same_wish_of_several_tokenizers_is_one_change_and_the_opposite_one_is_ignored() -> None:
    desk = Desk()
    assert [desk.wish(role) for role in (PREFILL, PREFILL, DECODE)] == [True, False, False]
    desk.roles.advance(is_idle=True)
    assert desk.roles.role is PREFILL


def test_between_two_changes_passes_the_interval_also_after_an_operator_s() -> None:
    desk = Desk()
    assert desk.signals().may_change
    desk.roles.set(PREFILL)
    desk.now = 59.9
    assert not desk.signals().may_change
    assert not desk.wish(DECODE)
    desk.now = 60.0
    assert desk.signals().may_change
    assert desk.wish(DECODE)


def test_an_operator_overrides_a_change_that_is_under_way() -> None:
    desk = Desk()
    assert desk.wish(PREFILL)
    desk.roles.set(DECODE)
    assert not desk.roles.is_changing
    desk.roles.advance(is_idle=True)
    assert desk.roles.role is DECODE


@pytest.mark.parametrize("is_changing", [False, True])
def test_an_operator_s_role_holds_for_the_interval_also_if_the_group_has_it_already(*, is_changing: bool) -> None:
    desk = Desk()
    if is_changing:
        assert desk.wish(PREFILL)
    desk.now = 1.0
    desk.roles.set(DECODE)
    desk.now = 60.9
    assert not desk.wish(PREFILL)
    desk.now = 61.0
    assert desk.wish(PREFILL)


@pytest.mark.parametrize(("home", "again"), [(BOTH, BOTH), (DECODE, DECODE), (PREFILL, DECODE)])
def test_a_group_that_generates_again_does_so_as_in_the_settings(home: GroupRole, again: GroupRole) -> None:
    desk = Desk(home)
    desk.roles.set(PREFILL)
    desk.now = 60.0
    assert desk.wish(DECODE)
    desk.roles.advance(is_idle=True)
    assert desk.roles.role is again


def test_a_wish_for_the_role_that_it_has_changes_nothing() -> None:
    assert not Desk(PREFILL).wish(PREFILL)
    assert not Desk(BOTH).wish(DECODE)


def test_a_fixed_role_reports_no_signals_and_follows_no_wish() -> None:
    desk = Desk(enabled=False)
    assert desk.roles.signals(desk.harness.core) is None
    assert not desk.wish(PREFILL)


def test_a_group_of_a_fixed_role_reports_a_role_that_its_settings_do_not_have() -> None:
    desk = Desk(enabled=False)
    assert desk.roles.signals(desk.harness.core) is None
    desk.roles.set(PREFILL)
    assert (desk.signals().own_role, desk.signals().follows_load) == (DECODE, False)


def test_a_group_with_open_sessions_changes_and_keeps_them() -> None:
    desk = Desk()
    desk.harness = Harness(sessions=RULES)
    view = View(Subject("tenant", "alice"))
    desk.harness.core.sessions.open(SessionWish(view, "talk", None, None))
    assert desk.signals().may_change
    assert desk.wish(PREFILL)
    desk.roles.advance(is_idle=True)
    assert (desk.roles.role, desk.signals().own_role) == (PREFILL, DECODE)
    assert len(desk.harness.core.sessions) == 1


def test_signals_say_how_full_the_group_is_and_how_long_requests_lack_a_row() -> None:
    desk = Desk()
    assert desk.signals() == RoleSignals(True, False, 0.0, 0.0, own_role=DECODE)
    for name in "abc":
        desk.submit(name, max_tokens=100)
    desk.harness.plan()
    desk.now = 1.3
    # One of three waits for one of two rows, in steps of a quarter of a second.
    assert desk.signals() == RoleSignals(True, False, 1.25, 1.0, own_role=DECODE)


def test_pages_that_rows_hold_count_and_those_of_the_cache_do_not() -> None:
    desk = Desk()
    desk.harness = Harness(max_rows=64, pages=32, max_step_tokens=128)
    desk.submit("a", length=60, max_tokens=40)
    desk.harness.plan()
    assert desk.signals().fullness == 0.5
    desk.harness.run()
    assert desk.harness.cache.evictable_pages > 0
    assert desk.signals().fullness == 0.0


def test_a_smaller_pool_for_windows_makes_no_idle_group_full() -> None:
    desk = Desk()
    desk.harness = Harness(max_rows=64, pages=64, window=16, window_pool=16)
    assert desk.signals().fullness == 0.0
    desk.submit("a", length=32, max_tokens=40)
    desk.harness.plan()
    windows = desk.harness.core.memory.windows
    assert windows is not None
    assert desk.signals().fullness == 1 - windows.pool.available_pages / 16 > 1 / 64


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    rules = {"enabled": True, "interval_s": 3600, "drain_s": 3600}
    pipeline = Pipeline(tmp_path, automatic_role=rules, host_tier={"pages": 64})
    await pipeline.start()
    await pipeline.ready()
    yield pipeline
    await pipeline.stop()


async def test_a_wish_on_the_stream_drains_the_group_and_its_requests_go_on(pipeline: Pipeline) -> None:
    await until(lambda: pipeline.loads and pipeline.loads[-1].serves and pipeline.loads[-1].signals.may_change)
    for worker in pipeline.workers:
        worker.step_s = 0.05
    assert not (await pipeline.submit("running", max_tokens=12)).HasField("rejected")
    await pipeline.wish_role(scheduler_pb2.SCHEDULER_ROLE_PREFILL)
    await until(lambda: any(load.signals.is_changing for load in pipeline.loads))
    draining = [load for load in pipeline.loads if load.signals.is_changing]
    assert {(load.serves, load.role) for load in draining} == {(False, scheduler_pb2.SCHEDULER_ROLE_BOTH)}
    change = (await pipeline.state()).role_change
    assert (change.role, change.reason) == (scheduler_pb2.SCHEDULER_ROLE_PREFILL, "a test")
    # A request that was on its way is served, too, and sessions stay whatever role the group has.
    assert not (await pipeline.submit("late", max_tokens=4)).HasField("rejected")
    await SessionsClient(pipeline.channel).open_session(SessionWish(View(Subject("tenant", "alice")), "talk"))
    await pipeline.finished("running", "late")
    assert pipeline.detokenizer.output_of("running") == expected_output(PROMPT, len(PROMPT) + 12, (STOP_ID,))
    await until(lambda: pipeline.loads[-1].role == scheduler_pb2.SCHEDULER_ROLE_PREFILL)
    await until(lambda: pipeline.loads[-1].serves and not pipeline.loads[-1].signals.may_change)
    state = await pipeline.state()
    assert state.role == scheduler_pb2.SCHEDULER_ROLE_PREFILL
    assert len(state.sessions) == 1
    assert not state.HasField("role_change")
    assert (state.running_rows, state.waiting_requests) == (0, 0)


async def test_an_operator_s_role_holds_for_the_interval(pipeline: Pipeline) -> None:
    change = scheduler_pb2.SetRoleRequest(role=scheduler_pb2.SCHEDULER_ROLE_PREFILL)
    await pipeline.stub.SetRole(change, metadata=ADMIN)
    await until(lambda: pipeline.loads[-1].role == scheduler_pb2.SCHEDULER_ROLE_PREFILL)
    await pipeline.wish_role(scheduler_pb2.SCHEDULER_ROLE_DECODE)
    # Messages of a stream are taken one after the other.
    assert not (await pipeline.submit("after")).HasField("rejected")
    assert (await pipeline.state()).role == scheduler_pb2.SCHEDULER_ROLE_PREFILL
    assert not any(load.signals.is_changing for load in pipeline.loads)
