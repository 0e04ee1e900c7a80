"""The next part is under way while one is used, and all of it ends when nothing more is wanted."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from services.worker.peers.one_ahead import one_ahead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Parts:
    """Yields numbers; each may come once it is `permitted`, and is noted in `begun` when it is asked for."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.begun: list[int] = []
        self.permitted = asyncio.Semaphore(count)
        self.is_closed = False
        self._count, self._error = count, error

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._count):
                self.begun.append(number)
                await self.permitted.acquire()
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


async def test_all_parts_come_in_order() -> None:
    parts = Parts(5)
    assert [part async for part in one_ahead(parts.run())] == [0, 1, 2, 3, 4]
    assert parts.is_closed


async def test_nothing_is_nothing() -> None:
    assert [part async for part in one_ahead(Parts(0).run())] == []


async def test_the_next_part_is_under_way_while_one_is_used_and_no_further() -> None:
    parts = Parts(5)
    async with contextlib.aclosing(one_ahead(parts.run())) as ahead:
        assert await anext(ahead) == 0
        # Anything that lets the loop run.
        async with asyncio.timeout(10):
            while len(parts.begun) < 2:  # noqa: ASYNC110  (nothing notifies)
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert parts.begun == [0, 1]


async def test_an_error_comes_after_the_parts_before_it() -> None:
    ahead = one_ahead(Parts(3, ValueError("broken")).run())
    assert [await anext(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        await anext(ahead)


async def test_the_source_is_closed_when_the_rest_is_not_wanted() -> None:
    parts = Parts(5)
    parts.permitted = asyncio.Semaphore(1)
    ahead = one_ahead(parts.run())
    assert await anext(ahead) == 0
    await ahead.aclose()
    assert parts.is_closed


async def test_a_caller_that_is_cancelled_while_it_waits_closes_the_source() -> None:
    parts = Parts(5)
    parts.permitted = asyncio.Semaphore(0)

    async def use() -> None:
        async with contextlib.aclosing(one_ahead(parts.run())) as ahead:
            await anext(ahead)

    using = asyncio.create_task(use())
    while not parts.begun:  # noqa: ASYNC110  (nothing notifies)
        await asyncio.sleep(0)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert parts.is_closed
