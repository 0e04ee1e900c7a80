"""`pando state` and `pando cache` against a scheduler that answers from a script, over a real socket."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from deploy.cli import main
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OWNER = common_pb2.Principal(tenant="acme", user="ann")
NODES = (
    scheduler_pb2.TreeNode(
        node_id=1,
        edge_tokens=3_200,
        depth_tokens=3_200,
        visibility=scheduler_pb2.VISIBILITY_PUBLIC,
        device_pages=range(200),
    ),
    scheduler_pb2.TreeNode(
        node_id=2,
        parent_id=1,
        edge_tokens=16,
        depth_tokens=3_216,
        visibility=scheduler_pb2.VISIBILITY_PRIVATE,
        owner=OWNER,
        lock_ref=1,
    ),
)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Answers always the same, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.credentials: list[str] = []

    def _note(self, request: object, context: grpc.ServicerContext) -> None:
        self.asked.append(request)
        self.credentials.append(str(dict(context.invocation_metadata()).get("authorization", "")))

    def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        self._note(request, context)
        tier = scheduler_pb2.TierAccounting(tier="device", capacity_pages=1_000, free_pages=700, protected_pages=300)
        open_request = scheduler_pb2.RequestState(request_id="abc", phase="DECODE", prompt_tokens=12, age_ms=1_500)
        return scheduler_pb2.GetStateResponse(
            worker_group="READY",
            running_rows=5,
            max_rows=64,
            page_size_tokens=16,
            tiers=[tier],
            requests=[open_request] if request.include_requests else [],
        )

    def DumpTree(
        self, request: scheduler_pb2.DumpTreeRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.DumpTreeResponse]:
        self._note(request, context)
        for node in NODES[: request.max_nodes or None]:
            yield scheduler_pb2.DumpTreeResponse(node=node)

    def FlushCache(
        self, request: scheduler_pb2.FlushCacheRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.FlushCacheResponse:
        self._note(request, context)
        return scheduler_pb2.FlushCacheResponse(freed_pages=1_234)

    def WatchCacheEvents(
        self, request: scheduler_pb2.WatchCacheEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.WatchCacheEventsResponse]:
        self._note(request, context)
        yield scheduler_pb2.WatchCacheEventsResponse(
            sequence=7, kind=scheduler_pb2.CACHE_EVENT_KIND_INSERTED, node=NODES[0]
        )
        yield scheduler_pb2.WatchCacheEventsResponse(sequence=8, kind=scheduler_pb2.CACHE_EVENT_KIND_FLUSHED)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[ScriptedScheduler, str]]:
    servicer = ScriptedScheduler()  # type: ignore[abstract]  # the generated base makes what is left out UNIMPLEMENTED
    address = f"unix:{tmp_path}/s.sock"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    yield servicer, address
    server.stop(None).wait()


def test_state_shows_rows_pages_and_open_requests(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["state", "--scheduler", scheduler[1], "--requests"]) == 0
    shown = capsys.readouterr().out
    for text in ("READY", "5 of 64", "1,000", "700", "abc#0", "1.5 s"):
        assert text in shown


def test_tree_hangs_children_below_their_parents(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "tree", "--scheduler", scheduler[1]]) == 0
    root, parent, child = capsys.readouterr().out.splitlines()[:3]
    assert root == "root"
    assert "1: 3,200 tokens (to 3,200), public, 200 device pages" in parent
    assert child.index("2:") > parent.index("1:")
    assert "private of acme/ann" in child


def test_tree_says_when_it_shows_only_a_part(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "tree", "--scheduler", scheduler[1], "--max-nodes", "1", "--principal", "acme/ann"]) == 0
    assert "--max-nodes 0 shows all" in capsys.readouterr().out
    request = scheduler[0].asked[0]
    assert isinstance(request, scheduler_pb2.DumpTreeRequest)
    assert request.principal == OWNER


def test_stats_count_by_visibility(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "stats", "--scheduler", scheduler[1]]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["public", "1", "3,200", "0"] in rows
    assert ["private", "1", "16", "1"] in rows


def test_flush_tells_what_it_freed(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "flush", "--scheduler", scheduler[1]]) == 0
    assert "1,234 pages freed" in capsys.readouterr().out


def test_watch_prints_each_change(scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "watch", "--scheduler", scheduler[1]]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["7", "inserted", "1:"]
    assert second.split() == ["8", "flushed"]


def test_the_admin_token_is_shown_to_the_scheduler(scheduler: tuple[ScriptedScheduler, str]) -> None:
    assert main(["state", "--scheduler", scheduler[1]]) == 0
    assert main(["state", "--scheduler", scheduler[1], "--admin-token", "s3cret"]) == 0
    assert scheduler[0].credentials == ["", "Bearer s3cret"]


def test_a_scheduler_that_is_away_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", "--scheduler", f"unix:{tmp_path}/nobody.sock"]) == 1
    assert "nobody.sock" in capsys.readouterr().err
