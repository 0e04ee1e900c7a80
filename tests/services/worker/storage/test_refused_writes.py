"""Storage that is read but refuses to write or to delete, as a full or a read-only disk does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from common.circuit_breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S
from services.worker.storage.files import FileStorage
from services.worker.storage.interface import StorageError
from services.worker.storage.tier import WorkerStorageTier
from tests.services.worker.storage.test_tier import DROP, FETCH, FORM, KEYS, STORE, Bench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, MutableMapping
    from pathlib import Path


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    assert await bench.tier.close()


@pytest.fixture
def events() -> Iterator[list[MutableMapping[str, Any]]]:
    with capture_logs() as events:
        yield events


def gauge(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"pando_worker_storage_{name}")


async def refuse(bench: Bench) -> None:
    """Let the disk be full until writes pause."""
    bench.storage.room = 0
    for _ in range(FAILURES_TO_OPEN):
        assert await bench.do(STORE, KEYS[10:20], list(range(10, 20))) == 0


async def test_writes_pause_after_a_few_failures_although_lookups_and_reads_succeed(bench: Bench) -> None:
    await bench.do(STORE, KEYS[:1], [0])
    bench.storage.room = 0
    bench.storage.calls.clear()
    for _ in range(50):
        assert await bench.do(STORE, KEYS[1:13], list(range(1, 13))) == 0
        assert await bench.do(FETCH, KEYS[:1], [19]) == 1
    assert bench.storage.calls.count("put") == FAILURES_TO_OPEN
    assert bench.storage.calls.count("exists") == FAILURES_TO_OPEN
    assert bench.storage.calls.count("get") == 50


async def test_after_each_pause_one_write_is_tried_and_pauses_double(bench: Bench) -> None:
    await refuse(bench)
    bench.storage.calls.clear()
    pause_s = FIRST_PAUSE_S
    for tried in range(10):
        bench.clock.time += 0.9 * pause_s
        await bench.do(STORE, KEYS[:1], [0])
        assert bench.storage.calls.count("put") == tried
        bench.clock.time += 0.1 * pause_s + 0.001
        for _ in range(3):
            await bench.do(STORE, KEYS[:1], [0])
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    bench.storage.room = None
    bench.clock.time += LONGEST_PAUSE_S
    for number in range(5):
        assert await bench.do(STORE, KEYS[number : number + 1], [number]) == 1


async def test_what_was_written_before_the_disk_was_full_is_not_written_again(bench: Bench) -> None:
    bench.storage.room = 11
    assert await bench.do(STORE, KEYS, list(range(20))) == 8
    for _ in range(FAILURES_TO_OPEN - 1):
        await bench.do(STORE, KEYS, list(range(20)))
    bench.storage.room = None
    bench.clock.time += FIRST_PAUSE_S
    assert await bench.do(STORE, KEYS, list(range(20))) == 20
    assert bench.storage.written == [FORM.name(key) for key in KEYS]


async def test_objects_that_are_all_there_do_not_end_the_pause(bench: Bench) -> None:
    await bench.do(STORE, KEYS[:2], [0, 1])
    await refuse(bench)
    bench.clock.time += FIRST_PAUSE_S
    assert await bench.do(STORE, KEYS[:2], [0, 1]) == 2
    assert gauge("writable") == 0
    assert await bench.do(STORE, KEYS[2:3], [2]) == 0
    bench.storage.calls.clear()
    assert await bench.do(STORE, KEYS[2:3], [2]) == 0
    assert bench.storage.calls == []


async def test_operators_are_told_once_why_writes_pause_and_once_when_they_go_on(
    bench: Bench, events: list[MutableMapping[str, Any]]
) -> None:
    assert gauge("writable") == 1
    await refuse(bench)
    for _ in range(5):
        bench.clock.time += LONGEST_PAUSE_S
        await bench.do(STORE, KEYS[:1], [0])
        assert gauge("writable") == 0
    assert gauge("available") == 1
    bench.storage.room = None
    bench.clock.time += LONGEST_PAUSE_S
    for number in range(3):
        await bench.do(STORE, KEYS[number : number + 1], [number])
    assert gauge("writable") == 1
    assert [(event["event"], event["log_level"]) for event in events] == [
        ("storage.writes_paused", "warning"),
        ("storage.writes_resumed", "info"),
    ]
    assert "[Errno 28] No space left on device" in events[0]["reason"]


async def test_a_storage_that_is_down_does_not_count_as_one_that_refuses_writes(
    bench: Bench, events: list[MutableMapping[str, Any]]
) -> None:
    bench.storage.is_down = True
    for _ in range(5):
        await bench.do(STORE, KEYS[:1], [0])
        await bench.do(DROP, KEYS[:1], [])
    assert [event["event"] for event in events] == ["storage.unavailable"]
    assert (gauge("available"), gauge("writable")) == (0, 1)
    bench.storage.is_down = False
    bench.clock.time += FIRST_PAUSE_S
    assert await bench.do(STORE, KEYS[:1], [0]) == 1


async def test_deletions_go_on_while_writes_pause_and_do_not_end_the_pause(bench: Bench) -> None:
    await bench.do(STORE, KEYS[:2], [0, 1])
    await refuse(bench)
    assert await bench.do(DROP, KEYS[:2], []) == 2
    assert bench.storage.objects == {}
    assert await bench.do(STORE, KEYS[:1], [0]) == 0
    assert gauge("writable") == 0


async def test_reads_go_on_while_deletions_are_refused(bench: Bench, events: list[MutableMapping[str, Any]]) -> None:
    await bench.do(STORE, KEYS[:10], list(range(10)))
    name = FORM.name(KEYS[5])
    bench.storage.objects[name] = bench.storage.objects[name][:-1]
    bench.storage.refuses_deletions = True
    for _ in range(10):
        assert await bench.do(DROP, KEYS[9:10], []) == 0
        assert await bench.do(DROP, KEYS[19:20], []) == 1, "there is nothing to delete"
        # With a damaged object, which cannot be deleted.
        assert await bench.do(FETCH, KEYS[:8], list(range(10, 18))) == 5
    assert bench.pages.pages[10:15] == bench.pages.pages[:5]
    assert bench.storage.calls.count("delete") == FAILURES_TO_OPEN
    assert [event["event"] for event in events] == ["storage.deletions_paused"]
    assert gauge("available") == 1
    bench.storage.refuses_deletions = False
    bench.clock.time += FIRST_PAUSE_S
    assert await bench.do(DROP, KEYS[9:10], []) == 1
    assert events[-1]["event"] == "storage.deletions_resumed"


async def test_a_defect_of_a_back_end_does_not_end_all_attempts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_many(_objects: object) -> None:
        raise ValueError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(bench.storage, "put_many", put_many)
        for _ in range(FAILURES_TO_OPEN):
            assert await bench.do(STORE, KEYS[:1], [0]) == 0
        assert gauge("writable") == 0
        bench.clock.time += FIRST_PAUSE_S
        await bench.do(STORE, KEYS[:1], [0])
    bench.clock.time += LONGEST_PAUSE_S
    assert await bench.do(STORE, KEYS[:1], [0]) == 1


async def test_a_directory_that_refuses_new_files_is_read_and_written_again_later(
    tmp_path: Path, events: list[MutableMapping[str, Any]]
) -> None:
    """Files take the place of its folders, as the superuser may write to a directory that is read-only."""
    bench = Bench()
    storage = FileStorage(tmp_path, 1 << 30)
    tier = bench.tier = WorkerStorageTier(storage, 60.0, threads=2, clock=bench.clock.now)
    await bench.do(STORE, KEYS[:1], [0])
    blocked = [tmp_path / f"{number:02x}" for number in range(256) if not (tmp_path / f"{number:02x}").exists()]
    for path in blocked:
        path.touch()
    wanted = tuple(key for key in KEYS if FORM.name(key)[-2:] != FORM.name(KEYS[0])[-2:])
    pages = list(range(len(wanted)))
    for _ in range(20):
        assert await bench.do(STORE, wanted, pages) == 0
        assert await bench.do(FETCH, KEYS[:1], [19]) == 1
    assert [event["event"] for event in events] == ["storage.writes_paused"]
    assert "[Errno " in events[0]["reason"]
    for path in blocked:
        path.unlink()
    bench.clock.time += FIRST_PAUSE_S
    assert await bench.do(STORE, wanted, pages) == len(wanted)
    assert [event["event"] for event in events] == ["storage.writes_paused", "storage.writes_resumed"]
    assert await tier.close()


def test_a_directory_that_cannot_be_looked_into_fails_as_storage_does(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, 1 << 30)
    (tmp_path / "00").mkdir()
    # Longer than any file name may be: of all reasons, one that holds for the superuser, too.
    with pytest.raises(StorageError, match="Errno"):
        storage.exists_many(["0" * 300])
