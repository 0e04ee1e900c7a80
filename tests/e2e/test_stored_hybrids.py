"""A model with recurrent layers over storage: chats continue after a restart of all services, and at another group."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from common.models import resolve_model
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
from services.scheduler.cache.debug.replay import replay
from tests.e2e.conftest import serve
from tests.e2e.test_hybrids import FIRST, FOUND, answer
from tests.fakes.redis_process import RedisProcess
from tests.services.worker.engine.families import FAMILIES, save_model
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

QUESTION = " and what did the dog do"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for storage and keyring, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="pando-hybrid-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, source = tmp_path_factory.mktemp("hybrid"), resolve_model("all-minilm-l6-v2").path
    name, options = FAMILIES["qwen3.5"]
    save_model(directory, name, {**options, "vocab_size": 30522})
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / file, directory / file)
    return directory


@contextmanager
def served_with(
    model: Path, storage: str, place: Path, root: Path, ranks: int = 1, log: Path | None = None
) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            device_pages=60,
            host_tier=HostTierSettings(pages=200),
            # Whether a load pays depends on the machine.
            storage=StorageSettings(prefetch="wait_complete", keyring=place / "keyring.db"),
            cache=CacheSettings(decision_log=log),
        ),
        worker=WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(storage), timeout_s=20.0)),
    )
    yield from serve(settings, root, ranks)


def is_stored(served: Served) -> bool:
    """Whether nothing is on its way to storage, and a snapshot of each depth is there."""
    state = served.state()
    on_host = {tier.tier: tier for tier in state.tiers}["host_snapshots"].evictable_pages
    return served.is_idle() and not state.storage.writing_pages and 2 <= on_host <= state.storage.stored_snapshots


def check_sharing(model: Path, storage: str, place: Path, root: Path, ranks: int = 1, log: Path | None = None) -> None:
    with served_with(model, storage, place, root, ranks, log) as one:
        text, cached = answer(one, FIRST, "alice")
        assert cached == 0
        wait_until(lambda: is_stored(one))
    turn = f"{FIRST}{text}{QUESTION}"
    # All services are new ones, with memory of their own.
    with served_with(model, storage, place, root, ranks, log) as other:
        # A stranger, who computes everything.
        cold, cached = answer(other, turn, "bob")
        assert cached == 0
        assert not other.state().storage.fetched_snapshots
        warm, cached = answer(other, turn, "alice")
        assert cached >= FOUND
        assert warm == cold
        state = other.state().storage
        assert state.fetched_snapshots == 1
        assert state.fetched_pages >= FOUND // 16
        assert not state.unused_pages


def test_a_chat_continues_after_a_restart_of_all_services(model: Path, place: Path, run_root: Path) -> None:
    check_sharing(model, str(place / "files"), place, run_root)


def test_a_chat_continues_from_a_redis_server(model: Path, place: Path, run_root: Path) -> None:
    process = RedisProcess(place)
    process.start()
    try:
        check_sharing(model, process.url, place, run_root)
    finally:
        process.kill()


def test_two_ranks_continue_from_their_parts(model: Path, place: Path, run_root: Path) -> None:
    check_sharing(model, str(place / "files"), place, run_root, ranks=2)


def test_a_chat_continues_beside_a_log_of_decisions_which_comes_out_the_same(
    model: Path, place: Path, run_root: Path
) -> None:
    log = place / "decisions.jsonl"
    check_sharing(model, str(place / "files"), place, run_root, log=log)
    with log.open("rb") as lines:
        report = replay(lines)
    assert report.difference is None
    assert not report.is_lost
    assert report.starts >= 2
    operations = {json.loads(line)["operation"] for line in log.read_bytes().splitlines()}
    assert operations >= {"fill_slot", "keep_slot", "plan_backups", "plan_storage", "prefetch", "load"}


def test_a_damaged_snapshot_is_computed_again_with_the_same_tokens(model: Path, place: Path, run_root: Path) -> None:
    files = place / "files"
    with served_with(model, str(files), place, run_root) as one:
        text, _ = answer(one, FIRST, "alice")
        wait_until(lambda: is_stored(one))
    turn = f"{FIRST}{text}{QUESTION}"
    largest = max(path.stat().st_size for path in files.rglob("*") if path.is_file())
    for path in files.rglob("*"):
        if path.is_file() and path.stat().st_size == largest:
            path.write_bytes(path.read_bytes()[:-1])
    with served_with(model, str(files), place, run_root) as other:
        damaged, cached = answer(other, turn, "alice")
        assert cached == 0
        assert answer(other, turn, "bob") == (damaged, 0)
        assert other.state().storage.misses
