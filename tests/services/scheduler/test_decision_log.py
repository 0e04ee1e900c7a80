from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import ConfigurationError
from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.debug.replay import encode_header, replay
from services.scheduler.cache.factory import make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.decision_log import DecisionLog
from tests.services.scheduler.cache.driver import ANN, BOB, PLAIN, Driver

if TYPE_CHECKING:
    from pathlib import Path


def recorded(log: DecisionLog) -> Driver:
    driver = Driver("shared", config=PLAIN)
    log.begin(encode_header("shared", 2, 64, PLAIN))
    driver.allocator = PageAllocator(64)
    driver.cache = RecordedCache(make_cache("shared", driver.allocator, 2, PLAIN), driver.allocator, log.note)
    return driver


def test_written_log_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path) as log:
        driver = recorded(log)
        driver.serve(ANN, [1, 2, 3, 4])
        driver.serve(BOB, [1, 2, 3, 4, 5, 6])
    report = replay(path.read_bytes().splitlines())
    assert (report.difference, report.nodes, report.is_lost) == (None, 1, False)


def test_only_the_owner_can_read_the_log_even_if_the_file_existed(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.touch(0o644)
    for _ in range(2):
        with DecisionLog(path):
            assert path.stat().st_mode & 0o777 == 0o600


def test_a_restarted_process_appends_after_the_partial_line_of_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path) as log:
        recorded(log).serve(ANN, [1, 2, 3, 4])
    os.truncate(path, path.stat().st_size - 7)
    with DecisionLog(path) as log:
        recorded(log).serve(BOB, [5, 6])
    lines = path.read_bytes().splitlines()
    report = replay(lines)
    assert (report.starts, report.difference, report.nodes) == (2, None, 1)


@pytest.mark.parametrize("kind", ["folder", "missing folder", "pipe", "link"])
def test_a_path_that_cannot_be_a_log_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "decisions.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "missing folder":
        path = path / "below"
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "elsewhere").touch()
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"cache\.decision_log .*decisions\.jsonl"):
        DecisionLog(path)


class StuckFile:
    """A disk that takes nothing until it is told to."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.may_go_on = threading.Event()

    def write(self, line: bytes) -> None:
        self.may_go_on.wait()
        self.file.write(line)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def test_slow_disk_never_delays_the_cache_and_ends_the_log(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path, limit=4) as log:
        log._file = stuck = StuckFile(log._file)  # type: ignore[assignment]  # only what the writer calls
        driver = recorded(log)
        for number in range(10):
            driver.serve(ANN, [number, 0])
        assert log.lost_decisions > 0
        stuck.may_go_on.set()
    report = replay(path.read_bytes().splitlines())
    assert (report.is_lost, report.difference) == (True, None)
    assert 0 < report.operations <= 6


def test_full_disk_ends_the_log_and_not_the_scheduler(tmp_path: Path) -> None:
    class FullFile(StuckFile):
        def write(self, line: bytes) -> None:
            raise OSError(28, "No space left on device")

    with DecisionLog(tmp_path / "decisions.jsonl", limit=4) as log:
        log._file = FullFile(log._file)  # type: ignore[assignment]  # only what the writer calls
        driver = recorded(log)
        for number in range(100):
            driver.serve(ANN, [number % 20, 0])
    assert driver.cache.peek(ANN, driver.admit(ANN, [3, 0, 1]).ids) == 2
