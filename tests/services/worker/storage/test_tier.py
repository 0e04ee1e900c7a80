from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client import REGISTRY

from common.storage import StorageAck, StorageOperation, StorageOrder, StorageOrderId
from services.worker.storage.objects import Miss, ObjectFormat
from services.worker.storage.shard import Shard
from services.worker.storage.tier import StorageTier
from tests.fakes.storage import FakeHostPages, FakeStorage
from tests.fakes.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FORM = ObjectFormat("layout", 8)
KEYS = tuple(bytes([number]) * 32 for number in range(20))


class Bench:
    def __init__(self, timeout_s: float = 5.0) -> None:
        self.storage = FakeStorage()
        self.clock = VirtualClock()
        self.tier = StorageTier(self.storage, timeout_s, threads=2, clock=self.clock.now)
        self.pages = FakeHostPages(8, [b"page %3d" % number for number in range(20)])
        self.shard = Shard(self.pages, FORM)
        self.acks: asyncio.Queue[StorageAck] = asyncio.Queue()

    async def do(self, operation: StorageOperation, keys: tuple[bytes, ...], pages: list[int]) -> tuple[bool, ...]:
        order = StorageOrder(StorageOrderId(7), operation, keys, np.array(pages, np.int32))
        self.tier.begin(order, self.shard, self.acks.put_nowait)
        ack = await asyncio.wait_for(self.acks.get(), 10)
        assert ack.order_id == 7
        return ack.done


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    assert await bench.tier.close()
    assert bench.storage.is_closed


async def test_what_was_stored_is_found_and_fetched_into_other_pages(bench: Bench) -> None:
    assert all(await bench.do(StorageOperation.STORE, KEYS[:10], list(range(10))))
    assert await bench.do(StorageOperation.FIND, KEYS, []) == (True,) * 10 + (False,) * 10
    assert all(await bench.do(StorageOperation.FETCH, KEYS[:10], list(range(10, 20))))
    assert bench.pages.pages[10:] == bench.pages.pages[:10]


async def test_a_fetch_ends_with_the_first_page_that_is_missing(bench: Bench) -> None:
    await bench.do(StorageOperation.STORE, (*KEYS[:3], *KEYS[4:6]), [0, 1, 2, 4, 5])
    before = list(bench.pages.pages)
    assert await bench.do(StorageOperation.FETCH, KEYS[:6], list(range(10, 16))) == (True,) * 3 + (False,) * 3
    assert bench.pages.pages[13:] == before[13:]


@pytest.mark.parametrize("kept", [0, 3, -1])
async def test_a_truncated_object_is_a_miss_and_its_page_is_not_touched(bench: Bench, kept: int) -> None:
    await bench.do(StorageOperation.STORE, KEYS[:3], [0, 1, 2])
    bench.storage.objects[FORM.name(KEYS[1])] = bench.storage.objects[FORM.name(KEYS[1])][:kept]
    before = list(bench.pages.pages)
    assert await bench.do(StorageOperation.FETCH, KEYS[:3], [10, 11, 12]) == (True, False, False)
    assert bench.pages.pages[11:] == before[11:]


async def test_what_was_deleted_is_missing(bench: Bench) -> None:
    await bench.do(StorageOperation.STORE, KEYS[:3], [0, 1, 2])
    assert await bench.do(StorageOperation.DELETE, KEYS[1:2], []) == (True,)
    assert await bench.do(StorageOperation.FIND, KEYS[:3], []) == (True, False, True)


async def test_a_storage_that_is_down_makes_misses_and_is_soon_left_alone(bench: Bench) -> None:
    bench.storage.is_down = True
    for _ in range(10):
        assert await bench.do(StorageOperation.FETCH, KEYS[:2], [0, 1]) == (False, False)
    assert len(bench.storage.calls) == 3
    bench.storage.is_down = False
    assert await bench.do(StorageOperation.STORE, KEYS[:1], [0]) == (False,)
    bench.clock.time += 60
    assert await bench.do(StorageOperation.STORE, KEYS[:1], [0]) == (True,)


async def test_a_storage_that_hangs_is_waited_for_only_so_long() -> None:
    bench = Bench(timeout_s=0.05)
    bench.storage.gate = threading.Event()
    try:
        assert await bench.do(StorageOperation.FETCH, KEYS[:2], [0, 1]) == (False, False)
        assert not await bench.tier.close(timeout_s=0.05)
    finally:
        bench.storage.gate.set()
    assert bench.pages.pages[0] == b"page   0"


async def test_a_closed_shard_is_neither_read_nor_written() -> None:
    bench = Bench()
    await bench.do(StorageOperation.STORE, KEYS[:2], [0, 1])
    bench.storage.gate = threading.Event()
    for operation, key in ((StorageOperation.FETCH, KEYS[0]), (StorageOperation.STORE, KEYS[5])):
        order = StorageOrder(StorageOrderId(8), operation, (key,), np.array([10], np.int32))
        bench.tier.begin(order, bench.shard, bench.acks.put_nowait)
    bench.shard.close()
    bench.storage.gate.set()
    assert await bench.tier.close(timeout_s=10)
    assert bench.pages.pages[10] == b"page  10"
    assert FORM.name(KEYS[5]) not in bench.storage.objects
    assert bench.acks.empty()


async def test_misses_are_counted_by_reason(bench: Bench) -> None:
    def count(reason: Miss) -> float:
        labels = {"operation": "fetch", "outcome": reason.value}
        return REGISTRY.get_sample_value("pando_worker_storage_pages_total", labels) or 0.0

    await bench.do(StorageOperation.STORE, KEYS[:1], [0])
    before = {reason: count(reason) for reason in Miss}
    await bench.do(StorageOperation.FETCH, KEYS[1:2], [0])
    blob = bench.storage.objects[FORM.name(KEYS[0])]
    for data in (blob[:-1], blob[:-1] + b"X", ObjectFormat("other", 8).encode(KEYS[0], bytes(8))):
        bench.storage.objects[FORM.name(KEYS[0])] = data
        await bench.do(StorageOperation.FETCH, KEYS[:1], [0])
    bench.storage.is_down = True
    await bench.do(StorageOperation.FETCH, KEYS[:1], [0])
    counted = {reason: count(reason) - before[reason] for reason in Miss}
    assert counted == {reason: 0 if reason is Miss.SLOW else 1 for reason in Miss}
