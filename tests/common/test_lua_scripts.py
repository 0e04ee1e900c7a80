"""Scripts of a real Redis server that it has received with a flipped bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from common.lua_scripts import DamagedScriptError, LuaScript
from tests.fakes.redis_process import temporary_redis

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Of a call that returns an empty list.
ARGUMENTS: list[str | int] = ["orphans", "p", "a", 1000, 1000]


@pytest.fixture
async def redis() -> AsyncIterator[Redis]:
    with temporary_redis() as process:
        async with Redis.from_url(process.url) as client:
            yield client


def damage_uploads(client: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let scripts that `client` sends arrive with another word in a comment, as long as the test is not undone."""
    execute = getattr(client, name)

    async def damaged(*arguments: Any, **options: Any) -> Any:
        changed = [each.replace("Records", "Secords") if isinstance(each, str) else each for each in arguments]
        return await execute(*(changed if "LOAD" in str(arguments[0]) else arguments), **options)

    monkeypatch.setattr(client, name, damaged)


async def test_a_script_that_arrived_damaged_is_not_run(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    script = LuaScript(redis, "gateway.answer_records", "records.lua")
    damage_uploads(redis, monkeypatch, "execute_command")
    for _ in range(2):
        with pytest.raises(DamagedScriptError, match="damaged script"):
            await script(args=ARGUMENTS)
    with pytest.raises(NoScriptError):
        await redis.evalsha(script.sha, 0, *ARGUMENTS)
    monkeypatch.undo()
    assert await script(args=ARGUMENTS) == []


async def test_a_pipeline_does_not_run_it_either(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    script = LuaScript(redis, "gateway.answer_records", "records.lua")
    async with redis.pipeline(transaction=False) as pipeline:
        damage_uploads(pipeline, monkeypatch, "immediate_execute_command")
        await script(args=ARGUMENTS, client=pipeline)
        with pytest.raises(DamagedScriptError, match="damaged script"):
            await pipeline.execute()
        monkeypatch.undo()
    async with redis.pipeline(transaction=False) as pipeline:
        await script(args=ARGUMENTS, client=pipeline)
        assert await pipeline.execute() == [[]]
