from __future__ import annotations

import asyncio
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client import REGISTRY

from common.circuit_breaker import FIRST_PAUSE_S, SILENCES_TO_OPEN
from common.transfers import Transfer, TransferAck, TransferDirection, TransferId
from services.worker.storage.objects import Miss, ObjectFormat
from services.worker.storage.redis_server import RedisStorage
from services.worker.storage.tier import BATCH_NAMES, Shard, WorkerStorageTier
from services.worker.stream_pages import StreamEndedError, StreamPages
from tests.fakes.storage import FakeHostPages, FakeHostStates, FakeStorage
from tests.fakes.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.redis_process import RedisProcess

FORM = ObjectFormat("layout", 8)
STATES = replace(FORM, state_bytes=9)
CIPHER_KEY = b"k" * 32
KEYS = tuple(bytes([number]) * 32 for number in range(20))


STORE, FETCH = TransferDirection.HOST_TO_STORAGE, TransferDirection.STORAGE_TO_HOST
DROP = TransferDirection.DROP_FROM_STORAGE
FIND = TransferDirection.FIND_IN_STORAGE


class Bench:
    def __init__(self, timeout_s: float = 60.0) -> None:
        self.storage = FakeStorage()
        self.clock = VirtualClock()
        self.tier = WorkerStorageTier(self.storage, timeout_s, threads=2, clock=self.clock.now)
        self.states = FakeHostStates(9, [b"state %3d" % number for number in range(6)])
        self.pages = FakeHostPages(8, [b"page %3d" % number for number in range(20)], self.states)
        self.stream_pages = StreamPages(self.pages)
        self.shard = Shard(self.stream_pages, FORM)
        self.of_states = Shard(self.stream_pages, STATES)
        self.acks: asyncio.Queue[TransferAck] = asyncio.Queue()

    def begin(
        self, direction: TransferDirection, keys: tuple[bytes, ...], pages: list[int], cipher_key: bytes = CIPHER_KEY
    ) -> None:
        transfer = Transfer(
            TransferId(7), direction, host_pages=np.array(pages, np.int32), object_keys=keys, cipher_key=cipher_key
        )
        self.tier.begin(transfer, self.shard, self.acks.put_nowait)

    async def do(
        self, direction: TransferDirection, keys: tuple[bytes, ...], pages: list[int], cipher_key: bytes = CIPHER_KEY
    ) -> int:
        self.begin(direction, keys, pages, cipher_key)
        ack = await asyncio.wait_for(self.acks.get(), 30)
        assert ack.transfer_id == 7
        return ack.done_pages

    async def do_states(
        self, direction: TransferDirection, keys: tuple[bytes, ...], slots: list[int], cipher_key: bytes = CIPHER_KEY
    ) -> int:
        slot_ids = np.array(slots, np.int32)
        transfer = Transfer(TransferId(7), direction, host_snapshots=slot_ids, object_keys=keys, cipher_key=cipher_key)
        self.tier.begin(transfer, self.of_states, self.acks.put_nowait)
        return (await asyncio.wait_for(self.acks.get(), 30)).done_pages


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    assert await bench.tier.close()
    assert bench.storage.is_closed


async def test_stored_pages_are_fetched_into_other_pages(bench: Bench) -> None:
    assert await bench.do(STORE, KEYS[:10], list(range(10))) == 10
    assert await bench.do(FETCH, KEYS[:10], list(range(10, 20))) == 10
    assert bench.pages.pages[10:] == bench.pages.pages[:10]


async def test_existing_objects_are_not_written_again(bench: Bench) -> None:
    await bench.do(STORE, KEYS[:3], [0, 1, 2])
    bench.storage.calls.clear()
    assert await bench.do(STORE, KEYS[:3], [0, 1, 2]) == 3
    assert bench.storage.calls == ["exists"]


async def test_a_fetch_ends_with_the_first_page_that_is_missing(bench: Bench) -> None:
    await bench.do(STORE, (*KEYS[:3], *KEYS[4:6]), [0, 1, 2, 4, 5])
    before = list(bench.pages.pages)
    assert await bench.do(FETCH, KEYS[:6], list(range(10, 16))) == 3
    assert bench.pages.pages[13:] == before[13:]


@pytest.mark.parametrize("kept", [0, 3, -1])
async def test_a_truncated_object_is_a_miss_that_touches_no_page_and_is_replaced(bench: Bench, kept: int) -> None:
    await bench.do(STORE, KEYS[:3], [0, 1, 2])
    bench.storage.objects[FORM.name(KEYS[1])] = bench.storage.objects[FORM.name(KEYS[1])][:kept]
    before = list(bench.pages.pages)
    assert await bench.do(FETCH, KEYS[:3], [10, 11, 12]) == 1
    assert bench.pages.pages[11:] == before[11:]
    await bench.do(STORE, KEYS[1:2], [1])
    assert await bench.do(FETCH, KEYS[:3], [10, 11, 12]) == 3


async def test_a_page_is_not_stored_as_it_is(bench: Bench) -> None:
    await bench.do(STORE, KEYS[:1], [0])
    (blob,) = bench.storage.objects.values()
    assert b"page" not in blob
    assert CIPHER_KEY not in blob


@pytest.mark.parametrize("forged", ["swapped", "flipped", "other_key", "unencrypted"])
async def test_a_forged_object_is_a_miss_that_touches_no_page_and_is_replaced(bench: Bench, forged: str) -> None:
    await bench.do(STORE, KEYS[:3], [0, 1, 2])
    objects, name = bench.storage.objects, FORM.name(KEYS[1])
    flipped = bytearray(objects[name])
    flipped[-20] ^= 1
    objects[name] = {
        "swapped": objects[FORM.name(KEYS[2])],
        "flipped": bytes(flipped),
        "other_key": bytes(FORM.encode(KEYS[1], b"o" * 32, b"page   1")),
        "unencrypted": objects[name][:-24] + b"page   1" + bytes(16),
    }[forged]
    before = list(bench.pages.pages)
    assert await bench.do(FETCH, KEYS[:3], [10, 11, 12]) == 1
    assert bench.pages.pages[11:] == before[11:]
    await bench.do(STORE, KEYS[1:2], [1])
    assert await bench.do(FETCH, KEYS[:3], [10, 11, 12]) == 3
    assert bench.pages.pages[10:13] == bench.pages.pages[:3]


async def test_without_the_key_that_it_was_stored_with_a_page_is_a_miss(bench: Bench) -> None:
    await bench.do(STORE, KEYS[:1], [0])
    assert await bench.do(FETCH, KEYS[:1], [10], b"n" * 32) == 0
    assert bench.pages.pages[10] == b"page  10"


async def test_dropped_objects_are_missing(bench: Bench) -> None:
    await bench.do(STORE, KEYS[:3], [0, 1, 2])
    assert await bench.do(DROP, KEYS[1:2], []) == 1
    assert await bench.do(FETCH, KEYS[:3], [10, 11, 12]) == 1


async def test_a_storage_that_is_down_gives_misses_and_soon_gets_no_calls(bench: Bench) -> None:
    bench.storage.is_down = True
    for _ in range(10):
        assert await bench.do(FETCH, KEYS[:2], [0, 1]) == 0
    assert len(bench.storage.calls) == 3
    bench.storage.is_down = False
    assert await bench.do(STORE, KEYS[:1], [0]) == 0
    bench.clock.time += 60
    assert await bench.do(STORE, KEYS[:1], [0]) == 1


async def test_a_hanging_storage_is_waited_for_only_until_the_timeout() -> None:
    bench = Bench(timeout_s=0.05)
    bench.storage.gate = threading.Event()
    try:
        assert await bench.do(FETCH, KEYS[:2], [0, 1]) == 0
        assert not await bench.tier.close(timeout_s=0.05)
    finally:
        bench.storage.gate.set()
    assert bench.pages.pages[0] == b"page   0"


async def test_a_server_that_has_stopped_gets_two_calls_and_is_used_again_when_it_goes_on(
    redis_process: RedisProcess,
) -> None:
    bench = Bench(timeout_s=0.5)
    storage = RedisStorage(redis_process.url, timeout_s=0.5, connections=2)
    tier = bench.tier = WorkerStorageTier(storage, 0.5, threads=2, clock=bench.clock.now)
    await bench.do(STORE, KEYS[:2], [0, 1])
    redis_process.signal(signal.SIGSTOP)
    try:
        for _ in range(SILENCES_TO_OPEN):
            assert available() == 1
            assert await bench.do(FETCH, KEYS[:1], [10]) == 0
        assert available() == 0
        reason = {"direction": "storage_to_host", "outcome": Miss.UNAVAILABLE.value}
        before = REGISTRY.get_sample_value("pando_worker_storage_pages_total", reason) or 0.0
        # Refused at once, without a call.
        assert await bench.do(FETCH, KEYS[:1], [10]) == 0
        assert REGISTRY.get_sample_value("pando_worker_storage_pages_total", reason) == before + 1
    finally:
        redis_process.signal(signal.SIGCONT)
    bench.clock.time += FIRST_PAUSE_S
    assert await bench.do(FETCH, KEYS[:2], [10, 11]) == 2
    assert available() == 1
    assert await tier.close(timeout_s=10)


def available() -> float | None:
    return REGISTRY.get_sample_value("pando_worker_storage_available")


async def test_a_closed_shard_is_neither_read_nor_written() -> None:
    bench = Bench()
    await bench.do(STORE, KEYS[:2], [0, 1])
    bench.storage.gate = threading.Event()
    bench.begin(FETCH, KEYS[:1], [10])
    bench.begin(STORE, KEYS[5:6], [10])
    bench.stream_pages.close()
    bench.storage.gate.set()
    await asyncio.sleep(0.05)
    assert await bench.tier.close(timeout_s=10)
    assert bench.pages.pages[10] == b"page  10"
    assert FORM.name(KEYS[5]) not in bench.storage.objects
    assert bench.acks.empty()


async def test_misses_are_counted_by_reason(bench: Bench) -> None:
    def count(reason: Miss) -> float:
        labels = {"direction": "storage_to_host", "outcome": reason.value}
        return REGISTRY.get_sample_value("pando_worker_storage_pages_total", labels) or 0.0

    before = {reason: count(reason) for reason in Miss}
    await bench.do(FETCH, KEYS[1:2], [0])
    blob = bytes(FORM.encode(KEYS[0], CIPHER_KEY, bytes(8)))
    foreign = bytes(ObjectFormat("other", 8).encode(KEYS[0], CIPHER_KEY, bytes(8)))
    for data in (blob[:-1], b"X" + blob[1:], blob[:-1] + bytes([blob[-1] ^ 1]), foreign):
        bench.storage.objects[FORM.name(KEYS[0])] = data
        await bench.do(FETCH, KEYS[:1], [0])
    bench.storage.is_down = True
    await bench.do(FETCH, KEYS[:1], [0])
    counted = {reason: count(reason) - before[reason] for reason in Miss}
    assert counted == {reason: 0 if reason is Miss.SLOW else 1 for reason in Miss}


async def test_stored_snapshots_are_fetched_into_other_slots_one_at_a_time(bench: Bench) -> None:
    assert await bench.do_states(STORE, KEYS[:3], [0, 1, 2]) == 3
    bench.storage.calls.clear()
    assert await bench.do_states(FETCH, KEYS[:3], [5, 4, 3]) == 3
    assert bench.states.contents[3:] == bench.states.contents[2::-1]
    assert bench.storage.calls == ["get"] * 3
    assert not any(b"state" in blob for blob in bench.storage.objects.values())


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "page", "other_key"])
async def test_a_damaged_snapshot_is_a_miss_that_touches_no_slot_and_is_replaced(bench: Bench, damage: str) -> None:
    await bench.do_states(STORE, KEYS[:1], [0])
    objects, name = bench.storage.objects, STATES.name(KEYS[0])
    whole = objects.pop(name)
    if damage != "missing":
        objects[name] = {
            "truncated": whole[:-1],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "page": bytes(FORM.encode(KEYS[0], CIPHER_KEY, b"page   1")),
            "other_key": bytes(STATES.encode(KEYS[0], b"o" * 32, b"state   0")),
        }[damage]
    before = list(bench.states.contents)
    assert await bench.do_states(FETCH, KEYS[:1], [5]) == 0
    assert bench.states.contents == before
    assert name not in objects
    await bench.do_states(STORE, KEYS[:1], [0])
    assert await bench.do_states(FETCH, KEYS[:1], [5]) == 1


async def test_snapshots_are_counted_apart_from_pages(bench: Bench) -> None:
    def counted() -> list[float]:
        labels = {"direction": "storage_to_host", "outcome": "done"}
        names = "pando_worker_storage_snapshots_total", "pando_worker_storage_pages_total"
        return [REGISTRY.get_sample_value(name, labels) or 0.0 for name in names]

    await bench.do_states(STORE, KEYS[:2], [0, 1])
    before = counted()
    await bench.do_states(FETCH, KEYS[:2], [2, 3])
    await bench.do(FIND, KEYS[:2], [], b"")
    assert counted() == [before[0] + 2, before[1]]


@pytest.mark.parametrize("stored", [[], [0], [3, 150], [BATCH_NAMES, 199], [199], [5, 6, 7]])
async def test_a_search_finds_the_last_name_that_exists_with_few_calls(bench: Bench, stored: list[int]) -> None:
    keys = tuple(number.to_bytes(32) for number in range(200))
    for number in stored:
        bench.storage.objects[STATES.name(keys[number])] = b""
    assert await bench.do(FIND, keys, [], b"") == (max(stored) + 1 if stored else 0)
    deepest = max(stored, default=0)
    assert bench.storage.calls == ["exists"] * -(-(200 - deepest) // BATCH_NAMES)


async def test_a_search_finds_nothing_in_a_storage_that_is_down(bench: Bench) -> None:
    await bench.do_states(STORE, KEYS[:2], [0, 1])
    bench.storage.is_down = True
    assert await bench.do(FIND, KEYS[:2], [], b"") == 0


async def test_a_closed_stream_s_slots_are_neither_read_nor_written(bench: Bench) -> None:
    await bench.do_states(STORE, KEYS[:1], [0])
    bench.stream_pages.close()
    with pytest.raises(StreamEndedError):
        bench.stream_pages.read_state(0)
    with pytest.raises(StreamEndedError):
        bench.stream_pages.write_state(5, memoryview(bytes(9)))
    assert bench.states.contents[5] == b"state   5"
