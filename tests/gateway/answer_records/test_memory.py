"""The bound on records in a gateway's memory, against the memory that they take."""

from __future__ import annotations

import gc
import itertools
import tracemalloc

import orjson
import pytest

from common.errors import QueueFullError
from common.types import Subject
from gateway.answer_records.memory_records import MemoryRecords
from gateway.answer_records.records import NewRecord, Writing, record_name

ROOM = 1024 * 1024
ANN = Subject("acme", "user/ann")


async def fill(records: MemoryRecords, tokens: int, *, finishes: bool) -> int:
    """Record answers of several tenants, as gateways serialize them, until there is no room; return their number."""
    for number in itertools.count():
        subject, owner = Subject(f"tenant-{number % 16}", f"user-{number}"), f"{records.gateway_id}:{number}"
        name = record_name(subject.tenant, subject.name, f"answer-{number}")
        request = orjson.dumps({"number": number, "messages": ["word " * 40]})
        try:
            await records.open(NewRecord(name, None, subject, request, owner))
        except QueueFullError:
            return number
        for at in range(tokens):
            if await records.append(name, owner, at, [orjson.dumps([[0, " word", [at]]])]) is not Writing.DONE:
                return number
        if finishes:
            await records.finish(name, owner, orjson.dumps({}))
    raise AssertionError("unreachable")


@pytest.mark.parametrize("finishes", [True, False])
@pytest.mark.parametrize("tokens", [0, 8, 200])
async def test_full_records_take_the_memory_that_they_may(tokens: int, finishes: bool) -> None:
    records = MemoryRecords(600.0, ROOM)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        count = await fill(records, tokens, finishes=finishes)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count > 100
    assert ROOM // 2 < after - before <= ROOM


async def test_following_a_record_copies_only_what_is_new() -> None:
    size, owner = 8 * 1024 * 1024, "gateway:1"
    records = MemoryRecords(600.0, 4 * size)
    await records.open(NewRecord("answer", None, ANN, bytes(size), owner))
    await records.append("answer", owner, 0, [bytes(size), b"new"])
    tracemalloc.start()
    try:
        found = await records.read("answer", 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert (found.chunks, found.written) == ([b"new"], 2)
    assert peak < size // 100
