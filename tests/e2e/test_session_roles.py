"""A session whose group begins to compute prompts, and generates again: every turn has the tokens of a single group."""

from __future__ import annotations

from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.settings.scheduler import AutomaticRoleSettings, HostTierSettings
from common.types import GroupRole
from common.wire.requests import role_from_wire, role_to_wire
from deploy.supervisor.layout import PlannedGroup, Replicas
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.byte_models import continued, save_byte_model
from tests.e2e.conftest import serve
from tests.e2e.test_disaggregation import state
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.served import Served

PREFILL, DECODE = GroupRole.PREFILL, GroupRole.DECODE
GROUPS = ("scheduler-0", "scheduler-1", "scheduler-2")
TOKENS = 12
PAGE = 16


def wish(served: Served, name: str, role: GroupRole) -> None:
    """Have a group change its role as a tokenizer does for the load, and wait until it has."""
    message = scheduler_pb2.SchedulerSubmitRequest(
        role_wish=scheduler_pb2.RoleWish(role=role_to_wire(role), reason="a test")
    )
    with grpc.insecure_channel(served.deployment.address_of(name), options=CHANNEL_OPTIONS) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Submit(iter([message]))
        wait_until(lambda: role_from_wire(state(served, name).role) is role)
        call.cancel()


def turn(served: Served, ids: list[int], **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with served.http() as http:
        response = http.post("/generate", json={"input_ids": ids, "sampling_params": params, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def open_session(served: Served) -> tuple[str, str]:
    """Return a session and its group, which may be the only one that the tokenizer knows by now."""
    with served.http() as http:
        session = str(http.post("/open_session", json={}).json())
    (home,) = [name for name in GROUPS if state(served, name).sessions]
    return session, home


@pytest.mark.extended
def test_a_session_goes_on_while_its_group_computes_prompts_and_after_that(tmp_path: Path, run_root: Path) -> None:
    random = Random(7)
    model = save_byte_model(tmp_path, "qwen3")
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            host_tier=HostTierSettings(pages=256),
            prefill_min_tokens=32,
            automatic_role=AutomaticRoleSettings(enabled=True, interval_s=0),
        ),
    )
    groups = (PlannedGroup(PREFILL), PlannedGroup(DECODE), PlannedGroup(DECODE))
    with contextmanager(serve)(settings, run_root, replicas=Replicas(groups=groups)) as served:
        session, home = open_session(served)
        other = next(name for name in GROUPS[1:] if name != home)
        conversation, last = [random.randrange(256) for _ in range(100)], None
        for number, role in enumerate((DECODE, PREFILL, PREFILL, DECODE)):
            if number and role_from_wire(state(served, home).role) is not role:
                wish(served, home, role)
            new = conversation if last is None else [random.randrange(256) for _ in range(20)]
            conversation = new if last is None else conversation + new
            params = {"id": session} if last is None else {"id": session, "rid": last}
            answer = turn(served, new, session_params=params)
            assert [answer["output_ids"]] == continued(model, [conversation], TOKENS), f"turn {number}"
            cached = answer["meta_info"]["cached_tokens"]
            # The pages of the turns before are its own, whatever role it has; also those that it has lent.
            assert cached >= (0 if last is None else (len(conversation) - len(new) - 1) // PAGE * PAGE)
            conversation += answer["output_ids"]
            last = answer["meta_info"]["id"]
            if number == 2:
                # A request of the session that continues no turn: another group generates, with pages of this one.
                before = state(served, other).disaggregation.fetched_pages
                ids = [*conversation, *(random.randrange(256) for _ in range(40))]
                answer = turn(served, ids, session_id=session)
                assert [answer["output_ids"]] == continued(model, [ids], TOKENS)
                assert state(served, other).disaggregation.fetched_pages - before >= len(conversation) // PAGE
        with served.http() as http:
            assert http.post("/close_session", json={"session_id": session}).status_code == 200
        assert not any(state(served, name).sessions for name in GROUPS)
