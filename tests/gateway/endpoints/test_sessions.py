"""Sessions over HTTP: whose they are, and what of a request tells the scheduler how it continues one."""

from __future__ import annotations

from typing import Any

import pytest

from common.types import SessionTurn, Subject, View
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.gateway.support import FakedGateway, error_of, gateway_saying


async def opened(gateway: FakedGateway, **fields: Any) -> str:
    response = await gateway.post("/open_session", fields)
    assert response.status_code == 200, response.text
    return str(response.json())


async def test_a_session_is_opened_used_and_closed() -> None:
    gateway = gateway_saying("a", "b")
    session = await opened(gateway, capacity_of_str_len=1000)
    answer = await gateway.post("/generate", {"text": "x", "session_params": {"id": session, "rid": None}})
    first = answer.json()["meta_info"]["id"]
    params = {"id": session, "rid": first, "offset": -1, "replace": True}
    second = await gateway.post("/generate", {"text": "y", "rid": "mine", "session_params": params})
    assert second.json()["meta_info"]["id"] == "mine"
    one, two = gateway.pipeline.submitted
    assert one.options.session == two.options.session == session
    assert one.options.turn == SessionTurn(first)
    assert two.options.turn == SessionTurn("mine", after=first, offset=-1, replace=True)
    # Only what begins a context may begin with a BOS.
    assert (one.add_special_tokens, two.add_special_tokens) == (None, False)
    ((view, name),) = gateway.model.sessions
    assert (view, name) == (one.view, session)
    assert one.view == two.view
    assert (await gateway.post("/close_session", {"session_id": session})).status_code == 200
    assert error_of(await gateway.post("/close_session", {"session_id": session}), 400)["param"] == "session_id"


async def test_an_opened_session_returns_its_capacity_and_timeout() -> None:
    gateway = gateway_saying("x")
    response = await gateway.post("/open_session", {"session_id": "s", "capacity_of_str_len": 500, "timeout": 2.5})
    assert response.json() == "s"
    assert response.headers["x-session-capacity-tokens"] == "500"
    assert response.headers["x-session-timeout-s"] == "2.5"
    assert error_of(await gateway.post("/open_session", {"session_id": "s"}), 400)["param"] == "session_id"


async def test_chats_and_completions_name_their_session_by_session_id() -> None:
    gateway = gateway_saying("x")
    session = await opened(gateway)
    await gateway.chat(session_id=session)
    await gateway.complete(session_id=session)
    await gateway.post("/generate", {"text": "x", "session_id": session})
    ((view, _),) = gateway.model.sessions
    assert len(gateway.pipeline.submitted) == 3
    for request in gateway.pipeline.submitted:
        assert (request.options.session, request.view, request.options.turn) == (session, view, None)


async def test_a_request_names_one_session() -> None:
    body = {"text": "x", "session_id": "a", "session_params": {"id": "b"}}
    assert error_of(await gateway_saying("x").post("/generate", body), 400)["param"] == "session_id"


async def test_a_user_s_session_belongs_to_that_user_only() -> None:
    gateway = gateway_saying("x")
    session = await opened(gateway, user_id="ann")
    await gateway.chat(session_id=session, user_id="ann")
    await gateway.chat(session_id=session, user_id="bob")
    ((view, _),) = gateway.model.sessions
    mine, theirs = gateway.pipeline.submitted
    assert mine.view == view == View(Subject("default", "local"), "user=ann")
    assert theirs.view == View(Subject("default", "local"), "user=bob")
    assert error_of(await gateway.post("/close_session", {"session_id": session, "user_id": "bob"}), 400)


async def test_each_key_has_separate_sessions_and_one_quota(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    save_keys(keys, [ApiKey(name, hash_of(name), "acme") for name in ("one", "two")])
    gateway = gateway_saying("x", keys_file=keys)
    for key, user in (("one", None), ("one", "ann"), ("two", None)):
        body = {"session_id": "chat", "user_id": user}
        response = await gateway.post("/open_session", body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
    assert len({view for view, _ in gateway.model.sessions}) == 3
    # Users that a key makes up do not multiply what it may open.
    assert [wish.view.subject.name for wish in gateway.model.sessions.values()] == ["key/one", "key/one", "key/two"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/open_session", {"capacity_of_str_len": 0}, "capacity_of_str_len"),
        ("/open_session", {"timeout": 0}, "timeout"),
        ("/open_session", {"session_id": "a\nb"}, "session_id"),
        ("/open_session", {"session_id": "x" * 300}, "session_id"),
        ("/open_session", {"model": "huge"}, "model"),
        ("/close_session", {}, "session_id"),
        ("/generate", {"text": "x", "session_params": {"rid": "r"}}, "session_params.id"),
        ("/generate", {"text": "x", "session_params": {"id": "s", "offset": "far"}}, "session_params.offset"),
        ("/generate", {"text": ["x", "y"], "session_params": {"id": "s"}}, "session_params"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "session_params": {"id": "s"}}, "session_params"),
    ],
)
async def test_invalid_session_requests_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    response = await gateway_saying("x").post(path, body)
    assert error_of(response, 404 if param == "model" else 400)["param"] == param
