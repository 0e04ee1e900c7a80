"""`kill -9` of one of two gateways in the middle of answers: it costs their clients a reconnect to the other one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.e2e.two_gateways import two_gateways
from tests.fakes.redis_process import temporary_redis
from tests.gateway.answers.reading import BODY, CHAT, Seen, read
from tests.gateway.support import error_of
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [ApiKey("ann", hash_of("ann"), "acme", "ann"), ApiKey("bob", hash_of("bob"), "acme", "bob")]
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in ("ann", "bob"))
LIMITS = '[tenants.acme]\nrequests_per_minute = 1000\ntokens_per_minute = 100000\nadapters = ["style"]\n'
SECRET = "a secret that has more than 32 characters"
TEXT = "Hello world"
ADAPTED = {**BODY, "model": "tiny:style"}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "Hello", "background": True}


@pytest.mark.slow
async def test_answers_of_a_killed_gateway_go_on_at_the_other_one(run_root: Path) -> None:
    directory = run_root / "killed-gateway"
    directory.mkdir()
    save_keys(directory / "keys.toml", KEYS)
    (directory / "limits.toml").write_text(LIMITS)
    with temporary_redis() as redis_process:
        async with two_gateways(
            directory,
            limits_file=directory / "limits.toml",
            keys_file=directory / "keys.toml",
            **{"state.url": redis_process.url, "state.secret": SECRET},
        ) as gateways:
            first, second = gateways.ports
            services = gateways.services
            undisturbed = Seen()
            await read(first, undisturbed, body=BODY, headers=ANN)

            services.automatic = 2
            key = {"idempotency-key": "k-1"}
            chat, background, joined, joining = Seen(), Seen(), Seen(), Seen()
            await read(
                first, background, path="/v1/responses", body={**RESPONSE, "stream": True}, headers=ANN, events=6
            )
            response = background.last_id.rpartition("/")[0]
            # Two clients are reading when the gateway dies; a third has joined at the other gateway.
            reading = [
                asyncio.create_task(cut_off(first, chat, ANN, BODY)),
                asyncio.create_task(cut_off(first, joined, {**ANN, **key}, ADAPTED)),
            ]
            await until(lambda: len(chat.datas) >= 3 and len(joined.datas) >= 3)
            following = asyncio.create_task(read(second, joining, body=ADAPTED, headers={**ANN, **key}))
            await until(lambda: len(joining.datas) >= 3)
            gateways.kill(0)
            await asyncio.gather(*reading)

            services.release.set()
            for body in (BODY, None):
                refused = await read(second, Seen([chat.last_id]), body=body, headers=BOB)
                assert error_of(refused, 404)
            await read(second, chat, body=BODY, headers=ANN)
            await read(second, joined, body=ADAPTED, headers={**ANN, **key})
            await following
            query = f"?stream=true&starting_after={background.numbers[-1]}"
            rest = Seen()
            answer = await read(second, rest, path=f"/v1/responses/{response}{query}", headers=ANN)
            assert answer.status_code == 200

    for seen in (chat, joined, joining):
        assert seen.text == undisturbed.text == TEXT
        assert seen.numbers == list(range(len(undisturbed.ids)))
        assert seen.usage == undisturbed.usage
    assert joining.datas == joined.datas
    assert background.text + rest.text == TEXT
    assert [*background.numbers, *rest.numbers] == list(range(len(background.ids) + len(rest.ids)))
    final = rest.chunks[-1]["response"]
    assert (final["status"], final["usage"]["output_tokens"]) == ("completed", 4)
    check_continued(services.requests)


async def cut_off(port: int, seen: Seen, headers: dict[str, str], body: dict[str, Any]) -> httpx.Response | None:
    """Read until the connection breaks."""
    try:
        return await read(port, seen, path=CHAT, body=body, headers=headers)
    except httpx.TransportError:
        return None


def check_continued(requests: list[Any]) -> None:
    """Each answer was submitted once by each gateway, with its first seed and the tokens that its clients had."""
    originals = {request.request_id: request for request in requests if "~" not in request.request_id}
    continued = [request for request in requests if "~" in request.request_id]
    assert len(originals) == 4, "one undisturbed, three interrupted"
    assert len(continued) == 3
    for request in continued:
        original = originals[request.request_id.partition("~")[0]]
        assert request.sampling == original.sampling
        assert request.adapter == original.adapter
        assert list(request.resume.token_ids) == [0, 1]
        assert request.resume.delivered_characters == len("Hello")
    assert sorted(request.adapter for request in continued) == ["", "", "style"]
