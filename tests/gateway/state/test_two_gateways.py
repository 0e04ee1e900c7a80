"""Two gateways that share a state, over HTTP: responses, aborts, and a server that goes away."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from common.errors import ConfigurationError, UnavailableError
from gateway.identity.keys import ApiKey, hash_of, save_keys
from gateway.state.aborts import Signatures
from tests.fakes.pipeline import says
from tests.fakes.redis_process import temporary_redis
from tests.gateway.state.servers import new_prefix, working
from tests.gateway.support import HELLO, FakedGateway, error_of, faked
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx

    from tests.fakes.pipeline import Script
    from tests.fakes.redis_process import RedisProcess

KEYS = [
    ApiKey("ann", hash_of("ann"), "acme", "ann"),
    ApiKey("bob", hash_of("bob"), "acme", "bob"),
    ApiKey("eve", hash_of("eve"), "other", "ann"),
    # A person who is called as the first version wrote the key `app`.
    ApiKey("odd", hash_of("odd"), "acme", "/app"),
    ApiKey("app", hash_of("app"), "acme", vouches_for_users=True),
    ApiKey("plain", hash_of("plain"), "acme"),
    ApiKey("root", hash_of("root"), "acme", admin=True),
]
SECRET = "a secret that has more than 32 characters"
LIMITS = "[tenants.acme]\nrequests_per_minute = 1000\n"


@asynccontextmanager
async def pair(
    redis_process: RedisProcess, directory: Path, script: Script | None, **settings: Any
) -> AsyncIterator[tuple[FakedGateway, FakedGateway]]:
    save_keys(directory / "keys.toml", KEYS)
    (directory / "limits.toml").write_text(settings.pop("limits", LIMITS))
    shared = {
        "state": {"url": redis_process.url, "prefix": new_prefix(), "secret": SECRET, **settings.pop("state", {})},
        "keys_file": directory / "keys.toml",
        "limits_file": directory / "limits.toml",
        **settings,
    }
    first, second = faked(script, **shared), faked(script, **shared)
    async with working(*first.state.background, *second.state.background):
        yield first, second
    for gateway in (first, second):
        await gateway.state.close()


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def respond(gateway: FakedGateway, key: str, **fields: Any) -> httpx.Response:
    return await gateway.post("/v1/responses", {"model": "tiny", "input": "Hello", **fields}, headers(key))


async def delete(gateway: FakedGateway, path: str, key: str) -> httpx.Response:
    async with gateway.client() as client:
        return await client.delete(path, headers=headers(key))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_found_continued_listed_and_deleted_by_the_other_gateway(
    redis_process: RedisProcess, tmp_path: Path, stream: bool
) -> None:
    async with pair(redis_process, tmp_path, says("Hi", " there")) as (first, second):
        for here, there in ((first, second), (second, first)):
            # At once: whoever has read the last byte finds it.
            created = await respond(here, "ann", stream=stream)
            response_id = created.text.partition('"id":"')[2].partition('"')[0]
            path = f"/v1/responses/{response_id}"
            assert (await there.get(path, headers("ann"))).json()["id"] == response_id
            [item] = (await there.get(f"{path}/input_items", headers("ann"))).json()["data"]
            assert item["role"] == "user"
            assert (await respond(there, "ann", input="And?", previous_response_id=response_id)).status_code == 200
            prompt: Any = there.pipeline.submitted[-1].prompt
            assert [message.content for message in prompt.messages] == ["Hello", "Hi there", "And?"]
            for stranger in ("bob", "eve", "odd", "app", "plain"):
                assert (await there.get(path, headers(stranger))).status_code == 404
                assert (await delete(there, path, stranger)).status_code == 404
                assert (await respond(there, stranger, previous_response_id=response_id)).status_code == 400
            assert (await delete(there, path, "ann")).status_code == 200
            assert (await here.get(path, headers("ann"))).status_code == 404


async def test_a_user_named_like_a_key_or_session_cannot_reach_their_responses(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    async with pair(redis_process, tmp_path, says("x")) as (first, second):
        keys_own = (await respond(first, "app")).json()["id"]
        carls = (await respond(first, "app", user="carl")).json()["id"]
        persons = (await respond(first, "odd")).json()["id"]
        for response_id in (keys_own, carls):
            for fields in ({}, {"user": "carl"}, {"user": "/app"}, {"user": "key/app"}, {"user": "session:x"}):
                stolen = await respond(second, "odd", previous_response_id=response_id, **fields)
                assert stolen.status_code == 400
        for name in ("/app", "user//app", "odd", "session:x"):
            assert (await respond(second, "app", previous_response_id=persons, user=name)).status_code == 400
        assert (await respond(second, "app", previous_response_id=carls, user="carl")).status_code == 200


async def test_an_abort_reaches_the_gateway_where_the_request_is_open(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    async with pair(redis_process, tmp_path, None) as (first, second):
        body = {"text": "Hello", "rid": "mine", "user": "carl"}
        asking = [asyncio.create_task(first.post("/generate", body, headers(key))) for key in ("ann", "plain")]
        await first.pipeline.submissions(2)
        await subscribed(redis_process, first, 2)

        async def abort(key: str, **fields: Any) -> httpx.Response:
            return await second.post("/abort_request", fields, headers(key))

        for key, rid in (("bob", "mine"), ("eve", "mine"), ("odd", "mine"), ("ann", "min"), ("ann", "mine.")):
            assert (await abort(key, rid=rid)).json() == {"aborted": 0}
        assert (await abort("ann", abort_all=True)).status_code == 403
        assert not first.pipeline.aborted
        assert (await abort("ann", rid="mine")).json() == {"aborted": 1}
        assert error_of(await asking[0], 400)["message"] == "the request was aborted on demand"
        assert not asking[1].done()
        assert (await abort("root", abort_all=True)).json() == {"aborted": 1}
        assert (await asking[1]).status_code == 400
        assert len(first.pipeline.aborted) == 2


async def test_without_a_state_secret_subjects_abort_their_own_requests_and_administrators_get_503(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    async with pair(redis_process, tmp_path, None, state={"secret": None}) as (first, second):
        body = {"text": "Hello", "rid": "mine"}
        asking = [asyncio.create_task(first.post("/generate", body, headers(key))) for key in ("ann", "bob")]
        await first.pipeline.submissions(2)
        await subscribed(redis_process, first, 2)

        async def abort(gateway: FakedGateway, key: str, **fields: Any) -> httpx.Response:
            return await gateway.post("/abort_request", fields, headers(key))

        assert (await abort(second, "eve", rid="mine")).json() == {"aborted": 0}
        assert (await abort(second, "ann", rid="mine")).json() == {"aborted": 1}
        for fields in ({"rid": "mine"}, {"abort_all": True}):
            assert "gateway.state.secret" in error_of(await abort(second, "root", **fields), 503)["message"]
        assert len(first.pipeline.aborted) == 1
        assert (await abort(first, "root", rid="mine")).json() == {"aborted": 1}
        assert [(await task).status_code for task in asking] == [400, 400]


async def test_without_a_secret_an_administrator_aborts_all_requests_of_a_single_gateway(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    save_keys(tmp_path / "keys.toml", KEYS)
    only = faked(None, state={"url": redis_process.url, "prefix": new_prefix()}, keys_file=tmp_path / "keys.toml")
    async with working(*only.state.background):
        asking = asyncio.create_task(only.post("/generate", {"text": "Hello"}, headers("ann")))
        await only.pipeline.submissions(1)
        await subscribed(redis_process, only, 1)
        answer = await only.post("/abort_request", {"abort_all": True}, headers("root"))
        assert answer.json() == {"aborted": 1}
        assert (await asking).status_code == 400
    await only.state.close()


# What a stranger who can write to the server may publish, as the first version trusted it.
OWN: dict[str, Any] = {"tenant": "acme", "subject": "user/ann", "vouches": False, "is_admin": False}
FORGERIES: dict[str, dict[str, Any]] = {
    "an administrator ends everything": {"request_id": None, "caller": OWN | {"is_admin": True}},
    "an administrator ends one": {"request_id": "mine", "caller": OWN | {"subject": "x", "is_admin": True}},
    "its subject ends everything": {"request_id": None, "caller": OWN},
    "its subject ends one": {"request_id": "mine", "caller": OWN},
    "reports to another key": {"request_id": "mine", "caller": OWN, "reports": "elsewhere"},
    "a field that is none": {"request_id": "mine", "caller": OWN | {"root": True}},
    "no caller": {"request_id": "mine", "caller": None},
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("secret", [SECRET, None])
async def test_forged_aborts_written_to_the_state_server_are_ignored(
    redis_process: RedisProcess, tmp_path: Path, forgery: str, secret: str | None
) -> None:
    async with pair(redis_process, tmp_path, None, state={"secret": secret}) as (first, _):
        asking = asyncio.create_task(first.post("/generate", {"text": "Hello", "rid": "mine"}, headers("ann")))
        await first.pipeline.submissions(1)
        await subscribed(redis_process, first, 2)
        prefix = first.settings.state.prefix
        content = {"from": "nowhere", "reports": f"{prefix}:abort:forged", **FORGERIES[forgery]}
        with redis_process.client() as client:
            client.publish(f"{prefix}:aborts", Signatures(None).seal(content))
            client.publish(f"{prefix}:aborts", Signatures("guess").seal(content))
            if forgery == "its subject ends one" and secret is None:
                # The one that a secret is needed against: docs/operations.md says so.
                assert (await asking).status_code == 400
                return
            # Both are still listening after it.
            assert (await first.post("/abort_request", {"rid": "other"}, headers("ann"))).json() == {"aborted": 0}
            assert not client.exists("elsewhere")
        assert not first.pipeline.aborted
        assert (await first.post("/abort_request", {"rid": "mine"}, headers("ann"))).json() == {"aborted": 1}
        assert (await asking).status_code == 400


def test_a_short_secret_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="at least 32 characters"):
        faked(None, state={"url": "redis://localhost:1", "secret": "short"})
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigurationError, match="at least 32 characters"):
        faked(None, state={"url": "redis://localhost:1", "secret": f"file:{tmp_path / 'secret'}"})


async def test_the_other_gateways_limits_and_headers_count(redis_process: RedisProcess, tmp_path: Path) -> None:
    limits = "[tenants.acme.each_user]\nrequests_per_minute = 2\n"
    async with pair(redis_process, tmp_path, says("x"), limits=limits) as (first, second):
        body = {"model": "tiny", "messages": HELLO}

        async def ask(gateway: FakedGateway, key: str) -> tuple[int, str]:
            answer = await gateway.post("/v1/chat/completions", body, headers(key))
            return answer.status_code, answer.headers["x-ratelimit-remaining-requests"]

        assert [await ask(gateway, "ann") for gateway in (first, second, first)] == [(200, "1"), (200, "0"), (429, "0")]
        # 1.9: neither a key nor a person of the same spelling.
        assert [await ask(second, "odd"), await ask(first, "app"), await ask(second, "plain")] == [(200, "1")] * 3


@pytest.mark.parametrize("failure", ["open", "closed"])
async def test_without_the_server_responses_are_503_and_the_rest_is_as_configured(tmp_path: Path, failure: str) -> None:
    with temporary_redis() as redis_process:
        async with pair(redis_process, tmp_path, says("x"), state={"failure": failure}) as (first, second):
            kept = (await respond(first, "ann")).json()["id"]
            redis_process.kill()
            await until(lambda: not is_up(second))
            path = f"/v1/responses/{kept}"
            refusals = [
                await respond(second, "ann"),
                await respond(second, "ann", store=False, previous_response_id=kept),
                await second.get(path, headers("ann")),
                await delete(second, path, "ann"),
                await second.post("/abort_request", {"rid": "elsewhere"}, headers("ann")),
            ]
            for refused in refusals:
                assert error_of(refused, 503)["code"] == "service_unavailable"
                assert int(refused.headers["retry-after"]) >= 1
            chat = {"model": "tiny", "messages": HELLO}
            limited = await second.post("/v1/chat/completions", chat, headers("ann"))
            unlimited = await second.post("/v1/chat/completions", chat, headers("eve"))
            assert unlimited.status_code == 200
            assert limited.status_code == (200 if failure == "open" else 503)
            assert ("x-ratelimit-remaining-requests" in limited.headers) == (failure == "open")
            assert (await respond(second, "eve", store=False)).status_code == 200
            redis_process.start()
            await until(lambda: is_up(second))
            assert (await respond(second, "ann")).status_code == 200
            assert (await second.get(path, headers("ann"))).status_code == 404, "this server keeps nothing on disk"


def is_up(gateway: FakedGateway) -> bool:
    """Whether a gateway takes its state server to be there."""
    try:
        gateway.state.stored.check()
    except UnavailableError:
        return False
    return True


async def subscribed(redis_process: RedisProcess, gateway: FakedGateway, count: int) -> None:
    """Wait until so many gateways listen for aborts."""
    channel = f"{gateway.settings.state.prefix}:aborts"
    with redis_process.client() as client:
        await until(lambda: client.pubsub_numsub(channel) == [(channel.encode(), count)])
