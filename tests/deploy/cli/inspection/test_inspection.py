"""`pando state` and `pando cache` against a scheduler that answers from a script, over a real socket."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from deploy.cli import main
from deploy.cli.inspection.arguments import parse_subject, subject_text
from deploy.cli.inspection.cache import describe
from protos.gen.pando.v1 import (
    common_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    sessions_pb2,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OWNER = common_pb2.View(subject=common_pb2.Subject(tenant="acme", name="ann"))
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
        owner_view=OWNER,
        lock_ref=1,
    ),
)

ACCOUNTING = scheduler_pb2.CacheAccounting(
    epoch=42,
    nodes=2_345,
    views=67,
    public_pages=8_901,
    merged_pages=11,
    events={"promoted": 3, "inserted": 2_000},
    hit_tokens={"device/public": 12_345},
    verdicts={"cut": 1},
    operations={"peek": scheduler_pb2.OperationCost(calls=1_000, cpu_seconds=0.005)},
)
OWNERS = (
    scheduler_pb2.OwnerAccounting(device_pages=8_901),
    scheduler_pb2.OwnerAccounting(fingerprint="00ff", device_pages=16, leases=1, active=True),
    scheduler_pb2.OwnerAccounting(fingerprint="11ff", view=OWNER, device_pages=8),
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
            sessions=[
                sessions_pb2.SessionState(fingerprint="00ff", capacity_tokens=4_096, pinned_tokens=1_232, turns=3),
                sessions_pb2.SessionState(view=OWNER, session="chat", open_requests=1),
            ],
            running_rows=5,
            max_rows=64,
            page_size_tokens=16,
            tiers=[tier],
            requests=[open_request] if request.include_requests else [],
            cache_accounting=ACCOUNTING,
            owners=OWNERS[: request.max_owners],
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

    def Forget(
        self, request: scheduler_pb2.ForgetRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.ForgetResponse:
        self._note(request, context)
        return scheduler_pb2.ForgetResponse(freed_pages=77)

    def Pin(self, request: scheduler_pb2.PinRequest, context: grpc.ServicerContext) -> scheduler_pb2.PinResponse:
        self._note(request, context)
        return scheduler_pb2.PinResponse(pinned_tokens=len(request.token_ids) // 4 * 4)

    def Unpin(self, request: scheduler_pb2.UnpinRequest, context: grpc.ServicerContext) -> scheduler_pb2.UnpinResponse:
        self._note(request, context)
        return scheduler_pb2.UnpinResponse(was_pinned=len(request.token_ids) > 6)

    def WatchCacheEvents(
        self, request: scheduler_pb2.WatchCacheEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.WatchCacheEventsResponse]:
        self._note(request, context)
        yield scheduler_pb2.WatchCacheEventsResponse(
            sequence=7, kind=scheduler_pb2.CACHE_EVENT_KIND_INSERTED, node=NODES[0]
        )
        yield scheduler_pb2.WatchCacheEventsResponse(sequence=8, kind=scheduler_pb2.CACHE_EVENT_KIND_FLUSHED)
        yield scheduler_pb2.WatchCacheEventsResponse(
            sequence=5_000, kind=scheduler_pb2.CACHE_EVENT_KIND_LOST, lost_events=4_992
        )


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


def test_state_shows_anonymous_and_named_sessions(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["state", "--scheduler", scheduler[1]]) == 0
    shown = capsys.readouterr().out
    assert "open sessions" in shown
    stranger, known = (next(line for line in shown.splitlines() if word in line) for word in ("00ff", "acme/ann"))
    assert all(word in stranger for word in ("1,232", "4,096", "3"))
    assert "chat" in known


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
    assert main(["cache", "tree", "--scheduler", scheduler[1], "--max-nodes", "1", "--view", "acme/ann"]) == 0
    assert "--max-nodes 0 shows all" in capsys.readouterr().out
    request = scheduler[0].asked[0]
    assert isinstance(request, scheduler_pb2.DumpTreeRequest)
    assert request.view == OWNER


def test_stats_show_totals_owners_and_costs(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "stats", "--scheduler", scheduler[1], "--owners", "2"]) == 0
    shown = capsys.readouterr().out
    for text in ("2,345, 67", "device/public 12,345", "inserted 2,000, promoted 3", "cut 1", "view:00ff", "5.0"):
        assert text in shown
    assert "acme" not in shown
    assert main(["cache", "stats", "--scheduler", scheduler[1]]) == 0
    assert "acme/ann" in capsys.readouterr().out


def test_tree_explains_why_a_node_is_public_and_shows_unusual_properties() -> None:
    node = scheduler_pb2.TreeNode(
        node_id=4,
        edge_tokens=32,
        visibility=scheduler_pb2.VISIBILITY_PUBLIC,
        state=scheduler_pb2.NODE_STATE_ON_HOST,
        host_pages=[1, 2],
        hits=9,
        users=2,
        epoch=8,
        promoted_by=3,
        promoted_epoch=7,
        creators=4,
        quarantined=1,
        token_ids=[5, 6],
    )
    text = describe(node)
    assert "public (by 3 users in epoch 7; 4 computed it)" in text
    for part in ("2 host pages", "on host", "9 hits by 2 users in epoch 8", "hidden from 1 users", "ids 5 6"):
        assert part in text
    assert "private of view:00ff" in describe(
        scheduler_pb2.TreeNode(visibility=scheduler_pb2.VISIBILITY_PRIVATE, owner_fingerprint="00ff")
    )
    assert "public (pinned)" in describe(
        scheduler_pb2.TreeNode(visibility=scheduler_pb2.VISIBILITY_PUBLIC, pinned=True)
    )


def test_a_view_is_asked_for_by_name_or_by_fingerprint(scheduler: tuple[ScriptedScheduler, str]) -> None:
    for action in ("tree", "watch"):
        assert main(["cache", action, "--scheduler", scheduler[1], "--fingerprint", "00ff"]) == 0
        assert main(["cache", action, "--scheduler", scheduler[1], "--view", "acme/a/b"]) == 0
    asked: list[Any] = scheduler[0].asked
    assert [request.fingerprint for request in asked] == ["00ff", "", "00ff", ""]
    assert asked[1].view == asked[3].view == common_pb2.View(subject=common_pb2.Subject(tenant="acme", name="a/b"))


@pytest.mark.parametrize("name", ["acme", "acme/", "/ann", ""])
def test_forget_refuses_an_incomplete_subject_name(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["cache", "forget", name, "--scheduler", scheduler[1]]) == 2
    assert "TENANT/SUBJECT" in capsys.readouterr().err
    assert scheduler[0].asked == []


def test_forget_names_its_subject_and_reports_the_freed_pages(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "forget", "acme/ann", "--scheduler", scheduler[1], "--admin-token", "s3cret"]) == 0
    assert "acme/ann is forgotten: 77 pages freed" in capsys.readouterr().out
    assert main(["cache", "forget", "acme/ann", "--session", "monday", "--scheduler", scheduler[1]]) == 0
    assert scheduler[0].asked == [
        scheduler_pb2.ForgetRequest(subject=OWNER.subject),
        scheduler_pb2.ForgetRequest(subject=OWNER.subject, session="monday"),
    ]
    assert scheduler[0].credentials == ["Bearer s3cret", ""]


class ScriptedTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """One id per letter."""

    def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        return tokenizer_pb2.TokenizeResponse(ids=map(ord, request.text))

    def RenderChat(
        self, request: tokenizer_pb2.RenderChatRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.RenderChatResponse:
        text = "".join(f"<{message.role}>{message.content}</>" for message in request.chat.messages)
        return tokenizer_pb2.RenderChatResponse(text=text, ids=map(ord, text))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[str]:
    address = f"unix:{tmp_path}/t.sock"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = ScriptedTokenizer()  # type: ignore[abstract]  # likewise
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None).wait()


def test_a_system_prompt_is_pinned_with_its_template_and_nothing_after_it(
    scheduler: tuple[ScriptedScheduler, str], tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Be kind.")
    places = ["--scheduler", scheduler[1], "--tokenizer", tokenizer]
    assert main(["cache", "pin", "--system", "Be kind.", *places]) == 0
    assert main(["cache", "pin", "--system-file", str(file), *places]) == 0
    assert main(["cache", "unpin", "--text", "Be kind.", *places]) == 0
    assert main(["cache", "unpin", "--text", "Be", *places]) == 0
    asked: list[Any] = scheduler[0].asked
    texts = ["".join(map(chr, request.token_ids)) for request in asked]
    assert texts == ["<system>Be kind.</><user>"] * 2 + ["Be kind.", "Be"]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "24 of 25 tokens are public from the next boundary on"
    assert shown[2:] == ["unpinned; cached entries stay public", "there is no such pin"]


def test_a_prompt_that_cannot_be_read_or_encoded_is_explained(
    scheduler: tuple[ScriptedScheduler, str], tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--scheduler", scheduler[1], "--tokenizer", tokenizer]
    assert main(["cache", "pin", "--text-file", str(tmp_path / "nowhere.txt"), *places]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    places[-1] = f"unix:{tmp_path}/nobody.sock"
    assert main(["cache", "pin", "--text", "x", *places]) == 2
    assert "the tokenizer at" in capsys.readouterr().err


def test_flush_reports_the_freed_pages(
    scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "flush", "--scheduler", scheduler[1]]) == 0
    assert "1,234 pages freed" in capsys.readouterr().out


def test_watch_prints_each_change(scheduler: tuple[ScriptedScheduler, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "watch", "--scheduler", scheduler[1]]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["7", "inserted", "1:"]
    assert second.split() == ["8", "flushed"]
    assert third.split()[:3] == ["5000", "lost", "4,992"]


def test_the_admin_token_is_shown_to_the_scheduler(scheduler: tuple[ScriptedScheduler, str]) -> None:
    assert main(["state", "--scheduler", scheduler[1]]) == 0
    assert main(["state", "--scheduler", scheduler[1], "--admin-token", "s3cret"]) == 0
    assert scheduler[0].credentials == ["", "Bearer s3cret"]


def test_an_unreachable_scheduler_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", "--scheduler", f"unix:{tmp_path}/nobody.sock"]) == 1
    assert "nobody.sock" in capsys.readouterr().err


@pytest.mark.parametrize("tenant", ["acme", "acme/user", "100%", "a%2Fb"])
def test_a_subject_of_any_tenant_can_be_named_and_no_other_is_meant(tenant: str) -> None:
    """`pando cache forget` took tenant acme/user for acme, and so forgot somebody else."""
    subject = common_pb2.Subject(tenant=tenant, name="user/x/y")
    assert parse_subject(subject_text(subject)) == subject
