"""The usage log has every record once, also if the gateway dies between any two of its steps."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from common.errors import ConfigurationError
from common.types import RequestId, Subject
from gateway.ledger.entries import DAY_S, LedgerEntry, Tokens, UsageRecords, Work
from gateway.ledger.sqlite_store import SqliteLedger
from gateway.ledger.usage_log import TAIL_BYTES, UsageLog, open_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOON = 1_767_268_800  # 2026-01-01 12:00 UTC
ANN = Subject("acme", "ann")
WORK = Work("tiny", "poems", "chat")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    open_directory(tmp_path / "log")
    return tmp_path / "log"


@pytest.fixture
def store(tmp_path: Path) -> SqliteLedger:
    return SqliteLedger(tmp_path / "ledger.db", 400 * DAY_S, has_log=True)


def entries(*names: str, output: int = 3) -> list[LedgerEntry]:
    tokens = Tokens(1, 10, 4, output, 1, 2)._replace(host_tenant_tokens=4)
    return [LedgerEntry(RequestId(name), ANN, WORK, NOON, tokens, has_ended=True) for name in names]


def lines(directory: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for path in files(directory) for line in path.read_bytes().splitlines()]


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("usage-*"))


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def names(directory: Path) -> list[str]:
    return [line["request_id"] for line in lines(directory)]


async def test_a_line_says_who_used_how_many_tokens_for_which_work(directory: Path, store: SqliteLedger) -> None:
    log = UsageLog(directory, store, lambda: NOON + 5)
    await store.write(entries("a"))
    await log.write()
    await log.write()
    [line] = lines(directory)
    assert len(line.pop("ledger")) == 16
    assert line == {
        "number": 1, "time": "2026-01-01T12:00:00Z", "request_id": "a", "tenant": "acme", "subject": "ann",
        "model": "tiny", "adapter": "poems", "operation": "chat", "batch": False, "requests": 1, "prompt_tokens": 10,
        "cached_tokens": 4, "output_tokens": 3, "forced_tokens": 1, "drafted_tokens": 2, "cached": {"host_tenant": 4},
    }  # fmt: skip
    assert [path.name for path in files(directory)] == ["usage-2026-01-01.jsonl"]


class Dying:
    """A store whose process dies before it has forgotten what is in the log."""

    def __init__(self, store: SqliteLedger) -> None:
        self.take_records = store.take_records

    async def forget_records(self, _last: int) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("torn", [b"", b'{"ledger":"x","num'])
async def test_after_a_crash_each_record_has_one_line(directory: Path, store: SqliteLedger, torn: bytes) -> None:
    dying = UsageLog(directory, Dying(store), lambda: NOON)  # type: ignore[arg-type]  # as much as a log needs
    await store.write(entries("a", "b"))
    with pytest.raises(KeyboardInterrupt):
        await dying.write()
    dying._lock.release()
    [path] = files(directory)
    append(path, torn)
    await store.write(entries("c"))
    # The next day, so that the newest file is not the one that is written.
    log = UsageLog(directory, store, lambda: NOON + DAY_S)
    await log.write()
    assert names(directory) == ["a", "b", "c"]
    assert len(files(directory)) == 2
    await log.close()
    await UsageLog(directory, store, lambda: NOON + DAY_S).close()
    assert names(directory) == ["a", "b", "c"]


async def test_lines_cut_off_by_a_crash_are_written_again(directory: Path, store: SqliteLedger) -> None:
    dying = UsageLog(directory, Dying(store), lambda: NOON)  # type: ignore[arg-type]  # as much as a log needs
    await store.write(entries("a", "b"))
    with pytest.raises(KeyboardInterrupt):
        await dying.write()
    dying._lock.release()
    [path] = files(directory)
    os.truncate(path, path.stat().st_size - 30)
    await UsageLog(directory, store, lambda: NOON).write()
    assert names(directory) == ["a", "b"]


async def test_a_clock_that_is_set_back_repeats_no_line(directory: Path, store: SqliteLedger) -> None:
    await store.write(entries("a"))
    await UsageLog(directory, store, lambda: NOON).close()
    dying = UsageLog(directory, Dying(store), lambda: NOON - DAY_S)  # type: ignore[arg-type]  # as much as a log needs
    await store.write(entries("b"))
    with pytest.raises(KeyboardInterrupt):
        await dying.write()
    dying._lock.release()
    await UsageLog(directory, store, lambda: NOON - DAY_S).close()
    assert sorted(names(directory)) == ["a", "b"]
    assert len(files(directory)) == 2


async def test_a_new_ledger_begins_to_count_again(directory: Path, store: SqliteLedger, tmp_path: Path) -> None:
    await store.write(entries("a"))
    first = UsageLog(directory, store, lambda: NOON)
    await first.close()
    other = SqliteLedger(tmp_path / "other.db", 400 * DAY_S, has_log=True)
    await other.write(entries("b"))
    second = UsageLog(directory, other, lambda: NOON)
    await second.close()
    assert [(line["request_id"], line["number"]) for line in lines(directory)] == [("a", 1), ("b", 1)]
    assert len({line["ledger"] for line in lines(directory)}) == 2


class Full:
    """A disk that is full for as long as it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        monkeypatch.setattr("gateway.ledger.usage_log.os.fsync", self._sync)

    def _sync(self, _file: int) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")


async def test_what_a_full_disk_refuses_is_written_later(
    directory: Path, store: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Full(monkeypatch)
    log = UsageLog(directory, store, lambda: NOON)
    await store.write(entries("a", "b"))
    await log.write()
    assert names(directory) == []
    disk.is_full = False
    await log.write()
    assert names(directory) == ["a", "b"]


async def test_a_write_that_is_cancelled_in_the_middle_is_not_repeated(
    directory: Path, store: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def sync(_file: int) -> None:
        begun.set()
        assert goes_on.wait(30)

    monkeypatch.setattr("gateway.ledger.usage_log.os.fsync", sync)
    log = UsageLog(directory, store, lambda: NOON)
    await store.write(entries("a", "b"))
    writing = asyncio.create_task(log.write())
    await asyncio.to_thread(begun.wait, 30)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0.05)
    goes_on.set()
    await closing
    assert names(directory) == ["a", "b"]


async def test_two_processes_cannot_write_one_log(directory: Path, store: SqliteLedger) -> None:
    UsageLog(directory, store)
    with pytest.raises(ConfigurationError, match="another gateway"):
        UsageLog(directory, store)


async def test_only_the_end_of_a_long_log_is_read(directory: Path, store: SqliteLedger) -> None:
    log = UsageLog(directory, store, lambda: NOON)
    await store.write(entries(*(f"r{number:04}" for number in range(1000))))
    await log.close()
    [path] = files(directory)
    append(path, b'{"ledger"')
    assert path.stat().st_size > 2 * TAIL_BYTES
    again = UsageLog(directory, store, lambda: NOON)
    await store.write(entries("last"))
    await again.close()
    assert [line["number"] for line in lines(directory)] == list(range(1, 1002))


async def test_more_records_than_are_taken_at_once_are_all_written(directory: Path, store: SqliteLedger) -> None:
    everything = [f"r{number:04}" for number in range(2500)]
    await store.write(entries(*everything))
    log = UsageLog(directory, store, lambda: NOON)
    await log.write()
    assert names(directory) == everything
    assert (await store.take_records(NOON)) == UsageRecords(lines(directory)[0]["ledger"], [])


@pytest.fixture(autouse=True)
def _closed(store: SqliteLedger) -> Iterator[None]:
    yield
    store._thread.shutdown()
    store._database.close()
