"""A state server that is wrong, slow, silent or gone."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.settings import GatewaySettings
from gateway.state.server import CONNECTIONS, StateAwayError, StateServer
from tests.fakes.redis_process import temporary_redis
from tests.gateway.state.servers import new_metrics, new_prefix, state_server
from tests.gateway.support import gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.redis_process import RedisProcess


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Take connections and never say anything."""
    server = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(3600), "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize(
    "url", ["redis", "http://x", "localhost:6379", "redis://h:port", "redis://h?no_such=1", "redis://:geheim@h/?a=b"]
)
def test_an_invalid_state_address_prevents_the_start_and_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"gateway\.state\.url") as refused:
        StateServer(url, new_metrics(), prefix="p", timeout_s=1.0)
    assert "geheim" not in str(refused.value)


async def test_state_and_responses_file_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match=r"responses\.file"):
        gateway_saying("x", state={"url": "redis://127.0.0.1:1"}, responses={"file": "responses.sqlite"})


async def test_memory_may_be_named() -> None:
    assert GatewaySettings.model_validate({"state": {"url": "memory"}}).state.url is not None
    assert (await gateway_saying("x", state={"url": "memory"}).chat()).status_code == 200


async def test_calls_that_wait_for_others_do_not_make_the_server_count_as_unavailable(
    redis_process: RedisProcess,
) -> None:
    """A burst of requests under one key, all of them beyond its limit, made all tenants' requests fail."""
    async with state_server(redis_process.url, new_prefix(), timeout_s=4.0) as server:
        calls = [server.call(lambda redis: redis.blpop("none", timeout=0.5)) for _ in range(9 * CONNECTIONS)]
        assert await asyncio.gather(*calls) == [None] * len(calls)
        assert server.is_up


async def test_a_silent_server_delays_one_call_by_the_timeout_and_no_other() -> None:
    async with silent_server() as url, state_server(url, "p", timeout_s=0.2, probes=False) as server:
        with pytest.raises(StateAwayError) as error:
            await server.call(lambda redis: redis.get("x"))
        assert error.value.was_sent
        for _ in range(1000):
            with pytest.raises(StateAwayError) as error:
                await server.call(lambda redis: redis.get("x"))
            assert not error.value.was_sent


async def test_an_outage_of_the_server_and_its_end_are_each_logged_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = new_metrics()
    with temporary_redis() as redis_process:
        async with state_server(redis_process.url, new_prefix(), metrics=metrics) as server:
            await until(lambda: b'link="state",model=""} 1.0' in metrics.exposition()[0])
            redis_process.kill()
            for _ in range(10):
                with pytest.raises(StateAwayError):
                    await server.call(lambda redis: redis.get("x"))
            await asyncio.sleep(1.2)  # two probes
            assert b'link="state",model=""} 0.0' in metrics.exposition()[0]
            redis_process.start()
            await server.wait_up()
            assert await server.call(lambda redis: redis.get("x")) is None
    said = capsys.readouterr().out
    assert said.count("state.away") == 1
    assert said.count("state.back") == 1


async def test_an_error_that_the_library_does_not_know_is_an_outage_and_ends_nothing(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises RuntimeError for a write to a connection that has just been reset."""

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unable to perform operation on a closed transport")

    async with state_server(redis_process.url, new_prefix()) as server:
        with pytest.raises(StateAwayError) as error:
            await server.call(lambda _: fail())
        assert error.value.was_sent
        assert not server.is_up
        # Probes outlive it, too: `state_server` would raise what they raise.
        with monkeypatch.context() as patch:
            patch.setattr(server.redis, "set", fail)
            await asyncio.sleep(1.2)  # two probes
            assert not server.is_up
        await server.wait_up()


async def test_a_state_server_that_refuses_writes_counts_as_down(redis_process: RedisProcess) -> None:
    with redis_process.client() as client:
        async with state_server(redis_process.url, new_prefix()) as server:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            try:
                await until(lambda: not server.is_up)
            finally:
                client.execute_command("REPLICAOF", "NO", "ONE")
            await server.wait_up()


async def test_the_name_of_the_metric_is_not_there_without_a_shared_state() -> None:
    assert 'link="state"' not in (await gateway_saying("x").get("/metrics")).text
