"""The endpoints that put a model to sleep and wake it, and what probes say meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from gateway.pipeline.port import SleepWish
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    from gateway.pipeline.port import SleepState


@pytest.mark.parametrize(
    ("query", "wish"),
    [
        ("", SleepWish(1, "drain")),
        ("?level=2", SleepWish(2, "drain")),
        ("?level=1&mode=abort", SleepWish(1, "abort")),
        ("?mode=requeue&keep_cache=true", SleepWish(1, "requeue", keep_cache=True)),
        # vLLM's names.
        ("?level=1&mode=wait", SleepWish(1, "drain")),
        ("?level=2&mode=keep", SleepWish(2, "requeue")),
    ],
)
async def test_a_wish_is_passed_on(query: str, wish: SleepWish) -> None:
    gateway = gateway_saying("x")
    response = await gateway.post(f"/sleep{query}", {})
    assert response.status_code == 200
    assert gateway.administration.wishes == [wish]
    assert response.json() == {"level": wish.level, "num_paused_requests": 3, "freed_bytes": 1500, "seconds": 1.5}


@pytest.mark.parametrize("query", ["?level=0", "?level=3", "?level=deep", "?mode=later", "?keep_cache=perhaps"])
async def test_senseless_wishes_are_refused(query: str) -> None:
    gateway = gateway_saying("x")
    assert (await gateway.post(f"/sleep{query}", {})).status_code == 400
    assert not gateway.administration.wishes


async def test_is_sleeping_follows() -> None:
    gateway = gateway_saying("x")
    assert (await gateway.get("/is_sleeping")).json() == {"is_sleeping": False}
    await gateway.post("/sleep", {})
    assert (await gateway.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await gateway.post("/wake_up?tags=weights", {})).json() == {"is_sleeping": True}
    assert (await gateway.post("/wake_up", {})).json() == {"is_sleeping": False}
    assert gateway.administration.woken == [("weights",), ()]
    assert (await gateway.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_failures_have_their_status() -> None:
    gateway = gateway_saying("x")
    gateway.administration.refusal = UnavailableError("the weights are being replaced", retry_after_ms=1000)
    response = await gateway.post("/sleep", {})
    assert response.status_code == 503
    assert "retry-after" in response.headers


@pytest.mark.parametrize(("wakes", "waker"), [(False, "/wake_up wakes it"), (True, "a request or /wake_up wakes it")])
async def test_a_model_that_sleeps_is_ready_and_says_why_it_does_not_answer_at_once(wakes: bool, waker: str) -> None:
    gateway = gateway_saying("x")
    gateway.administration.sleep_level, gateway.administration.wakes_on_request = 2, wakes
    response = await gateway.get("/ready")
    assert response.status_code == 200
    assert response.json() == {
        "status": "sleeping",
        "missing": [],
        "sleeping": [f"put to sleep at level 2; {waker}"],
    }


async def test_a_model_whose_scheduler_cannot_be_asked_is_as_ready_as_its_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = gateway_saying("x")

    async def nobody() -> list[SleepState]:
        raise UnavailableError("no scheduler")

    monkeypatch.setattr(gateway.administration, "sleep_states", nobody)
    assert (await gateway.get("/ready")).json() == {"status": "ready", "missing": []}
