"""Turns of lines are shared fairly, between tenants and between the owners of a tenant."""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway.batches.files import FileOwner
from gateway.batches.turns import LineTurns

ANN, BOB, EVE = FileOwner("acme", "user/ann"), FileOwner("acme", "user/bob"), FileOwner("other", "user/eve")


async def shares(turns: LineTurns, batches: list[FileOwner], lines: int) -> Counter[FileOwner]:
    """Return how many turns each owner has had when `lines` lines of batches without an end have run."""
    had: Counter[FileOwner] = Counter()

    async def work(owner: FileOwner, release: asyncio.Queue[FileOwner]) -> None:
        while True:
            await turns.take(owner)
            had[owner] += 1
            release.put_nowait(owner)

    running: asyncio.Queue[FileOwner] = asyncio.Queue()
    tasks = [asyncio.create_task(work(owner, running)) for owner in batches]
    while sum(had.values()) < lines:
        turns.give_back(await running.get())
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return had


async def test_the_number_of_batches_gives_no_tenant_and_no_owner_more() -> None:
    had = await shares(LineTurns(12), [ANN, ANN, ANN, ANN, ANN, BOB, EVE], 1200)
    assert abs(had[EVE] - 600) < 60
    assert abs(had[ANN] - 300) < 60
    assert abs(had[BOB] - 300) < 60


async def test_one_owner_alone_has_all_turns() -> None:
    turns = LineTurns(3)
    for _ in range(3):
        await asyncio.wait_for(turns.take(ANN), 10)
    fourth = asyncio.create_task(turns.take(ANN))
    await asyncio.sleep(0)
    assert not fourth.done()
    turns.give_back(ANN)
    await asyncio.wait_for(fourth, 10)


async def test_cancelled_lines_leave_no_turn_taken() -> None:
    turns = LineTurns(1)
    await turns.take(ANN)
    waiting = [asyncio.create_task(turns.take(owner)) for owner in (BOB, EVE, BOB)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    turns.give_back(ANN)
    # Its turn has been granted, and it has not seen it.
    waiting[1].cancel()
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await asyncio.wait_for(waiting[2], 10)
    turns.give_back(BOB)
    await asyncio.wait_for(turns.take(ANN), 10)
