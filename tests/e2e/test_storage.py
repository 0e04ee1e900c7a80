"""Two deployments with one storage: what one has computed, the other finds for the same user and for nobody else."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, WorkerSettings
from services.scheduler.cache.replay import replay
from tests.e2e.conftest import serve
from tests.e2e.ring import ask
from tests.fakes.redis_process import RedisProcess
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.served import Served

PROMPT = list(range(2000, 2200))
WHOLE_PAGES = 192


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for storage and keyring, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="pando-storage-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def redis_process(place: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(place)
    process.start()
    yield process
    process.kill()


@contextmanager
def served_with(storage: str, place: Path, root: Path) -> Iterator[Served]:
    """Run an engine that makes tokens up, with a host tier and a storage."""
    log = place / f"decisions-{len(logs_in(place))}.jsonl"
    log.touch()
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            max_rows=8,
            device_pages=200,
            cache_host_pages=200,
            storage_prefetch="wait_complete",
            storage_keyring=place / "keyring.db",
            cache_decision_log=log,
        ),
        worker=WorkerSettings(storage=SecretStr(storage), storage_timeout_s=10.0),
    )
    yield from serve(settings, root)


def logs_in(place: Path) -> list[Path]:
    return sorted(place.glob("decisions-*.jsonl"))


def check_logs(place: Path, operations: set[str]) -> None:
    """Check that what each deployment decided, of all tiers, comes out again."""
    found: set[str] = set()
    for log in logs_in(place):
        with log.open("rb") as lines:
            report = replay(lines)
        assert report.difference is None
        assert not report.is_lost
        found |= {json.loads(line)["operation"] for line in log.read_bytes().splitlines()}
    assert operations <= found


def cached(served: Served, user: str, prompt: list[int] = PROMPT) -> int:
    with served.leaving_nothing_behind():
        (answer,) = ask(served, [prompt], 4, user).answers
    return answer.cached_tokens


def check_sharing(storage: str, place: Path, root: Path) -> None:
    with served_with(storage, place, root) as one, served_with(storage, place, root) as other:
        assert cached(one, "ann") == 0
        wait_until(lambda: one.state().storage.stored_pages >= WHOLE_PAGES // 16)
        assert cached(other, "bob") == 0
        assert cached(other, "ann") == WHOLE_PAGES
        assert other.state().storage.fetched_pages == WHOLE_PAGES // 16
    check_logs(place, {"commit", "insert", "plan_backups", "prefetch", "plan_storage", "load", "finish", "advance"})


def test_two_deployments_share_a_directory(place: Path, run_root: Path) -> None:
    check_sharing(str(place / "files"), place, run_root)


def test_two_deployments_share_a_redis(redis_process: RedisProcess, place: Path, run_root: Path) -> None:
    check_sharing(redis_process.url, place, run_root)


def test_answers_go_on_while_redis_dies(redis_process: RedisProcess, place: Path, run_root: Path) -> None:
    with served_with(redis_process.url, place, run_root) as served:
        assert cached(served, "ann") == 0
        redis_process.kill()
        started = time.monotonic()
        for number in range(8):  # each asks something of its own: what all of them ask would become public
            assert cached(served, f"user-{number}", [3000 + number, *PROMPT]) == 0
        assert time.monotonic() - started < 90
        assert cached(served, "ann") == WHOLE_PAGES  # from the device
    check_logs(place, {"commit", "insert", "plan_storage", "finish"})
