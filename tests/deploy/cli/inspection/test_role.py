from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from deploy.cli import main
from deploy.cli.inspection import role
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PREFILL, DECODE = scheduler_pb2.SCHEDULER_ROLE_PREFILL, scheduler_pb2.SCHEDULER_ROLE_DECODE


class DrainingScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Ends one of its requests, or else one of its leases, each time that it is asked for its state."""

    def __init__(self) -> None:
        self.role: scheduler_pb2.SchedulerRole.ValueType = DECODE
        self.rows, self.leases = 2, 1
        self.wish: scheduler_pb2.RoleWish | None = None

    def SetRole(
        self, request: scheduler_pb2.SetRoleRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.SetRoleResponse:
        if ("authorization", "Bearer s3cret") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "administrators only")
        self.role = request.role
        return scheduler_pb2.SetRoleResponse()

    def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        state = scheduler_pb2.GetStateResponse(role=self.role, running_rows=self.rows)
        if self.wish is not None:
            state.role_change.CopyFrom(self.wish)
        state.disaggregation.open_leases = self.leases
        state.disaggregation.remote_prefills = 1_234
        self.leases -= self.rows == 0 and self.leases > 0
        self.rows -= self.rows > 0
        return state


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DrainingScheduler, str]]:
    monkeypatch.setattr(role, "POLL_S", 0.0)
    servicer = DrainingScheduler()  # type: ignore[abstract]  # the generated base makes what is left out UNIMPLEMENTED
    address = f"unix:{tmp_path}/s.sock"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    yield servicer, address
    server.stop(None).wait()


def test_a_role_is_shown_and_left_alone(
    scheduler: tuple[DrainingScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["role", "--scheduler", scheduler[1]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("role decode: 2 open requests, 1 prompts offered")
    assert "1,234 by others" in shown
    assert scheduler[0].role == DECODE


def test_a_change_that_waits_for_open_requests_is_shown(
    scheduler: tuple[DrainingScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler[0].wish = scheduler_pb2.RoleWish(role=PREFILL, reason="prompts wait")
    assert main(["role", "--scheduler", scheduler[1]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("role decode: ")
    assert shown.endswith("; prefill once these requests have ended, as the load asks for it: prompts wait")


def test_a_drained_group_has_no_requests_of_its_role_before(
    scheduler: tuple[DrainingScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--drain", "--scheduler", scheduler[1], "--admin-token", "s3cret"]
    assert main(["role", "prefill", *arguments]) == 0
    assert scheduler[0].role == PREFILL
    assert " ".join(capsys.readouterr().out.split()).startswith("role prefill: 0 open requests, 0 prompts offered")


def test_a_role_is_changed_by_administrators_only(
    scheduler: tuple[DrainingScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["role", "prefill", "--scheduler", scheduler[1]]) == 1
    assert "administrators only" in capsys.readouterr().err
    assert scheduler[0].role == DECODE
