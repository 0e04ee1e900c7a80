"""Where the time of a request went: who may know it, and what is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UnavailableError
from common.types import Subject, View
from gateway.generation.recent import RecentRequest, RecentRequests
from gateway.identity.keys import ApiKey, hash_of, save_keys
from gateway.pipeline.port import ScheduledMilestone, ScheduledRequest
from tests.fakes.pipeline import FakeAdministration, says
from tests.gateway.support import HELLO, error_of, faked, gateway_saying

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from common.types import RequestId

FOUND = {"tokens": 32, "public_tokens": 0, "tenant_tokens": 16, "host_tokens": 8, "storage_tokens": 0}
MILESTONES = (
    ScheduledMilestone("arrived", 100.0, 0),
    ScheduledMilestone("started", 101.0, 0, wait="memory", found=FOUND),
    ScheduledMilestone("retracted", 102.0, 0),
    ScheduledMilestone("started", 103.0, 0, wait="turn", found=FOUND),
    ScheduledMilestone("prefilled", 104.0, 0),
    ScheduledMilestone("ended", 106.0, 0, finish_reason="stop", output_tokens=2, charged_tokens=9),
)


async def test_a_finished_request_is_shown_phase_by_phase() -> None:
    gateway = gateway_saying("a", "b")
    answer = (await gateway.chat()).json()
    [submitted] = gateway.pipeline.submitted
    gateway.administration.scheduled = [ScheduledRequest(submitted.request_id, MILESTONES)]
    found = (await gateway.get(f"/v1/requests/{answer['id']}/timeline")).json()
    assert gateway.administration.asked == [((submitted.request_id,), submitted.view.subject)]
    assert (found["id"], found["model"], found["status"]) == (answer["id"], "tiny", "completed")
    assert found["received_at"] <= found["first_token_at"] <= found["ended_at"]
    usage = answer["usage"]
    assert found["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert found["usage"]["charged_tokens"] == 9
    assert len(found["trace_id"]) == 32
    own = {"request_id": submitted.request_id, "choice": 0}
    phases = [phase for phase in found["phases"] if phase["name"] not in ("tokenize", "deliver")]
    assert phases == [
        {"name": "queue", **own, "start": 100, "end": 101, "waited_for": "memory"},
        {"name": "prefill", **own, "start": 101, "end": 102, "cached": FOUND},
        {"name": "queue", **own, "start": 102, "end": 103, "waited_for": "turn", "after_retraction": True},
        {"name": "prefill", **own, "start": 103, "end": 104, "cached": FOUND},
        {
            "name": "decode",
            **own,
            "start": 104,
            "end": 106,
            "finish_reason": "stop",
            "output_tokens": 2,
            "charged_tokens": 9,
        },
    ]
    assert "Hello" not in str(found)


async def test_only_the_owner_and_administrators_see_that_a_request_exists(tmp_path: Path) -> None:
    keys = [ApiKey(name, hash_of(name), "acme", admin=name == "root") for name in ("ann", "bob", "root")]
    save_keys(tmp_path / "keys.toml", keys)
    gateway = faked(says("a"), keys_file=tmp_path / "keys.toml")

    def bearer(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}"}

    body = {"model": "tiny", "messages": HELLO}
    answer = (await gateway.post("/v1/chat/completions", body, bearer("ann"))).json()
    path = f"/v1/requests/{answer['id']}/timeline"
    assert (await gateway.get(path)).status_code == 401
    refused, unknown = (
        await gateway.get(path, bearer("bob")),
        await gateway.get("/v1/requests/x/timeline", bearer("bob")),
    )
    assert error_of(refused, 404) == error_of(unknown, 404)
    for name in ("ann", "root"):
        assert (await gateway.get(path, bearer(name))).json()["id"] == answer["id"]


async def test_without_a_scheduler_to_ask_the_gateways_own_times_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(self: FakeAdministration, request_ids: Sequence[RequestId], subject: Subject) -> None:
        raise UnavailableError("this gateway knows no scheduler")

    monkeypatch.setattr(FakeAdministration, "timelines", away)
    gateway = gateway_saying("a")
    answer = (await gateway.chat()).json()
    found = (await gateway.get(f"/v1/requests/{answer['id']}/timeline")).json()
    assert (found["incomplete"], found["phases"]) == ("this gateway knows no scheduler", [])


def test_the_oldest_requests_are_forgotten() -> None:
    recent = RecentRequests(limit=2)
    view = View(Subject("acme", "ann"))
    for name in ("a", "b", "c"):
        recent.add(name, RecentRequest(view, "tiny"))
    assert [recent.find(name, lambda _view: True) is None for name in ("a", "b", "c")] == [True, False, False]
    assert recent.find("c", lambda seen: seen != view) is None
