from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from common.rpc.stream import FIRST_PAUSE_S, MAX_PAUSE_S, keep_connecting

if TYPE_CHECKING:
    from collections.abc import Sequence


async def pauses_after(outcomes: Sequence[bool], seconds: float = 0.0) -> list[float]:
    """Return its waits after each of `outcomes`, which take so many seconds each."""
    pauses: list[float] = []
    remaining = iter(outcomes)

    async def run_once() -> bool:
        await asyncio.sleep(seconds)
        return next(remaining)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == len(outcomes):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await keep_connecting(run_once, sleep)
    return pauses


async def test_pauses_grow_up_to_a_bound_while_the_peer_stays_away() -> None:
    pauses = await pauses_after([False] * 8)
    assert all(later == min(2 * earlier, MAX_PAUSE_S) for earlier, later in pairwise(pauses))
    assert pauses[-1] == MAX_PAUSE_S


async def test_a_connection_that_had_succeeded_is_retried_soon() -> None:
    pauses = await pauses_after([False] * 5 + [True])
    assert pauses[-1] == FIRST_PAUSE_S


async def test_an_attempt_that_took_long_itself_is_followed_by_a_short_pause() -> None:
    assert await pauses_after([False] * 4, seconds=MAX_PAUSE_S + 0.05) == [FIRST_PAUSE_S] * 4
