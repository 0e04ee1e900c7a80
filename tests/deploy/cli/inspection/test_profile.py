"""`pando profile`: all ranks at once, and each one's refusal."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from common.errors import ConfigurationError
from deploy.cli import main
from deploy.supervisor.state import DeploymentState, ServiceState
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Rank(worker_pb2_grpc.WorkerServicer):
    """Records nothing, but says that it does."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seconds: float | None = None

    def StartProfile(
        self, request: worker_pb2.StartProfileRequest, context: grpc.ServicerContext
    ) -> worker_pb2.StartProfileResponse:
        if self.seconds is not None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a profile is being recorded already")
        self.seconds = request.max_seconds
        return worker_pb2.StartProfileResponse(path=f"/traces/rank{self.number}.json.gz", max_seconds=12)

    def StopProfile(
        self, request: worker_pb2.StopProfileRequest, context: grpc.ServicerContext
    ) -> worker_pb2.StopProfileResponse:
        return worker_pb2.StopProfileResponse(path=f"/traces/rank{self.number}.json.gz", passes=1234, bytes=3 * 2**19)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[list[Rank], list[str]]]:
    found, flags, servers = [], [], []
    for number in range(2):
        server = grpc.server(futures.ThreadPoolExecutor(1))
        rank = Rank(number)  # type: ignore[abstract]  # the generated base answers what it doesn't
        worker_pb2_grpc.add_WorkerServicer_to_server(rank, server)
        address = f"unix:{tmp_path}/{number}.sock"
        server.add_insecure_port(address)
        server.start()
        servers.append(server)
        found.append(rank)
        flags += ["--worker", address]
    yield found, flags
    for server in servers:
        server.stop(None)


def test_all_ranks_begin_and_end_together(
    ranks: tuple[list[Rank], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    found, flags = ranks
    assert main(["profile", "start", "--seconds", "12.5", *flags]) == 0
    assert [rank.seconds for rank in found] == [12.5, 12.5]
    assert "recording for at most 12 s, to /traces/rank1.json.gz" in capsys.readouterr().out
    assert main(["profile", "stop", *flags]) == 0
    assert "/traces/rank0.json.gz: 1,234 passes, 1.5 MiB" in capsys.readouterr().out


def test_a_rank_s_refusal_is_reported_and_the_other_ranks_start(
    ranks: tuple[list[Rank], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    found, flags = ranks
    found[0].seconds = 1.0
    assert main(["profile", "start", *flags]) == 1
    told = capsys.readouterr()
    assert "already" in told.err
    assert "rank1" in told.out


def test_a_deployment_knows_its_ranks() -> None:
    def state(*names: str) -> DeploymentState:
        return DeploymentState(1, "http://here", "m", {name: ServiceState(f"unix:{name}") for name in names})

    assert state("gateway", "worker").workers() == ("unix:worker",)
    assert state("worker-1", "worker-0", "gateway").workers() == ("unix:worker-0", "unix:worker-1")
    with pytest.raises(ConfigurationError, match="runs no worker-0"):
        state("gateway").workers()
