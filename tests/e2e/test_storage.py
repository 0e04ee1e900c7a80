"""Two deployments with one storage: what one has computed, the other finds for the same user and for nobody else."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from pydantic import SecretStr

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import (
    CacheSettings,
    GatewaySettings,
    HostTierSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    StorageSettings,
    WorkerSettings,
    WorkerStorageSettings,
)
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.cache.debug.replay import replay
from tests.e2e.conftest import serve
from tests.e2e.pipeline import ask
from tests.fakes.redis_process import RedisProcess
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PROMPT = list(range(2000, 2200))
WHOLE_PAGES = 192
ADMIN_TOKEN = "an-administrator-of-this-test-alone"
AS_ADMIN = (("authorization", f"Bearer {ADMIN_TOKEN}"),)


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
def served_with(storage: str, place: Path, root: Path, ranks: int = 1) -> Iterator[Served]:
    """Run an engine that makes tokens up, with a host tier and a storage."""
    log = place / f"decisions-{len(logs_in(place))}.jsonl"
    log.touch()
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            max_rows=8,
            device_pages=200,
            host_tier=HostTierSettings(pages=200),
            storage=StorageSettings(prefetch="wait_complete", keyring=place / "keyring.db"),
            cache=CacheSettings(decision_log=log),
            admin_token=SecretStr(ADMIN_TOKEN),
        ),
        worker=WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(storage), timeout_s=10.0)),
    )
    yield from serve(settings, root, ranks)


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


def flush(served: Served) -> None:
    """Empty device and host."""
    with scheduler_of(served) as scheduler:
        scheduler.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=60, metadata=AS_ADMIN)


@contextmanager
def scheduler_of(served: Served) -> Iterator[scheduler_pb2_grpc.SchedulerStub]:
    with grpc.insecure_channel(served.deployment.address_of("scheduler"), options=CHANNEL_OPTIONS) as channel:
        yield scheduler_pb2_grpc.SchedulerStub(channel)


def stored(files: Path) -> dict[Path, bytes]:
    """Return the pages in a directory; those that are dropped meanwhile may be missing."""
    found = {}
    for path in sorted(files.rglob("*-*")):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found[path] = path.read_bytes()
    return found


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("ranks", [1, 2])
def test_write_access_to_the_directory_does_not_allow_forged_pages(place: Path, run_root: Path, ranks: int) -> None:
    """Pages of others, altered pages and pages from backups are computed as if they were not there."""
    files, pages = place / "files", ranks * WHOLE_PAGES // 16
    with served_with(str(files), place, run_root, ranks) as served:
        assert cached(served, "ann") == 0
        wait_until(lambda: len(stored(files)) == pages)
        own = stored(files)
        others = [number + 5000 for number in PROMPT]
        assert cached(served, "bob", others) == 0
        wait_until(lambda: len(stored(files)) == 2 * pages)
        foreign = [content for path, content in stored(files).items() if path not in own]
        first = served.state().storage.fetched_pages

        def is_found_after(forged: dict[Path, bytes]) -> bool:
            for path, content in forged.items():
                path.write_bytes(content)
            flush(served)
            before = served.state().storage.stored_pages
            if cached(served, "ann"):
                return True
            # What was computed again is written again, which must not meet what is forged next.
            wait_until(lambda: served.state().storage.stored_pages >= before + WHOLE_PAGES // 16)
            return False

        attacks = {
            "altered": {path: flipped(content) for path, content in own.items()},
            "cut": {path: content[:-1] for path, content in own.items()},
            "another page of the same user": dict(
                zip(own, [*list(own.values())[1:], next(iter(own.values()))], strict=True)
            ),
            "another user's": dict(zip(own, foreign, strict=True)),
            "empty": dict.fromkeys(own, b""),
        }
        for name, forged in attacks.items():
            assert not is_found_after(forged), name
            # A forged page gives way to a whole one, when it has been noticed or is written again.
            for path, content in own.items():
                path.write_bytes(content)
        assert served.state().storage.fetched_pages == first
        assert is_found_after(own), "its own pages are found, so the attacks were what prevented it"

        with scheduler_of(served) as scheduler:
            subject = common_pb2.Subject(tenant="test", name="ann")
            scheduler.Forget(scheduler_pb2.ForgetRequest(subject=subject), timeout=60, metadata=AS_ADMIN)
        wait_until(lambda: not set(own) & set(stored(files)), what=lambda: "what was stored of her is dropped")
        assert not is_found_after(own), "under their old names, from a backup"
        wait_until(lambda: len(stored(files)) == 3 * pages)
        new = [path for path, content in stored(files).items() if path not in own and content not in foreign]
        assert is_found_after({}), "what was computed again is stored under a new key"
        assert not is_found_after(dict(zip(new, own.values(), strict=True))), "old pages under new names"
    with served_with(str(files), place, run_root, ranks) as served:
        assert cached(served, "bob", others) == WHOLE_PAGES


def test_answers_go_on_while_redis_dies(redis_process: RedisProcess, place: Path, run_root: Path) -> None:
    with served_with(redis_process.url, place, run_root) as served:
        assert cached(served, "ann") == 0
        redis_process.kill()
        for number in range(8):  # each asks something of its own: what all of them ask would become public
            assert cached(served, f"user-{number}", [3000 + number, *PROMPT]) == 0
        assert cached(served, "ann") == WHOLE_PAGES  # from the device
    check_logs(place, {"commit", "insert", "plan_storage", "finish"})
