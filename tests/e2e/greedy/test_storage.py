"""Greedy answers are those of `transformers` in fp32, too, where a prompt's KV comes from storage, or fails to."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from pydantic import SecretStr

from common import models
from common.rpc.options import CHANNEL_OPTIONS
from common.settings import (
    GatewaySettings,
    HostTierSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    StorageSettings,
    WorkerSettings,
    WorkerStorageSettings,
)
from common.types import CacheMode
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.conftest import require_model, serve
from tests.e2e.greedy.checks import EXACT, PAGE, TIMEOUT_S, cacheable, check_answers, pick
from tests.e2e.greedy.reference import OUTPUT_TOKENS
from tests.e2e.pipeline import ask
from tests.fakes.redis_process import RedisProcess
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(TIMEOUT_S)

LONG = pick("length-300")
EVERYTHING = cacheable(len(LONG[0].prompt_ids))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for storage and keyring, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="pando-storage-"))
    yield directory
    shutil.rmtree(directory)


@contextmanager
def served_with(
    storage: str, place: Path, root: Path, ranks: int = 1, model: ModelSettings = EXACT
) -> Iterator[Served]:
    """Run the real model with a host tier and a storage, for requests that wait for what is there."""
    require_model()
    scheduler = SchedulerSettings(
        max_rows=4,
        page_size=PAGE,
        device_pages=100,
        host_tier=HostTierSettings(pages=100),
        storage=StorageSettings(prefetch="wait_complete", keyring=place / "keyring.db"),
    )
    worker = WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(storage), timeout_s=10.0))
    settings = Settings(
        model=model, gateway=GatewaySettings(port=0, anonymous="vouched"), scheduler=scheduler, worker=worker
    )
    yield from serve(settings, root, ranks)


def cached(served: Served, user: str = "ann", mode: CacheMode = CacheMode.DEFAULT) -> int:
    """Ask, check the answer, and return the number of the prompt's cached tokens."""
    with served.leaving_nothing_behind():
        asked = ask(served, [LONG[0].prompt_ids], OUTPUT_TOKENS, user, mode)
    check_answers(LONG, asked.answers)
    return asked.answers[0].cached_tokens


def store(served: Served) -> None:
    """Wait until what has been asked is stored."""
    wait_until(lambda: served.state().storage.stored_pages >= EVERYTHING // PAGE, timeout_s=120)


def flush(served: Served) -> None:
    """Empty device and host."""
    with grpc.insecure_channel(served.deployment.address_of("scheduler"), options=CHANNEL_OPTIONS) as channel:
        scheduler_pb2_grpc.SchedulerStub(channel).FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=60)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_answers_are_the_same_from_files_after_a_restart_of_everything_and_with_some_of_them_damaged(
    place: Path, run_root: Path, ranks: int
) -> None:
    files = place / "files"
    with served_with(str(files), place, run_root, ranks) as served:
        assert cached(served, mode=CacheMode.NONE) == 0
        assert list(files.rglob("*-*")) == []
        assert cached(served) == 0
        store(served)
    with served_with(str(files), place, run_root, ranks) as served:
        assert cached(served, "bob") == 0
        assert cached(served) == EVERYTHING
        assert served.state().storage.fetched_pages == EVERYTHING // PAGE
        for path in sorted(files.rglob("*-*"))[::5]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        flush(served)
        assert cached(served) < EVERYTHING
        assert cached(served) == EVERYTHING  # from the device


@pytest.mark.extended
def test_weights_that_differ_in_one_bit_share_no_page(place: Path, run_root: Path) -> None:
    """As a base model and its fine-tune do not, or two files of one header."""
    files, other = place / "files", place / "other.gguf"
    with served_with(str(files), place, run_root) as served:
        assert cached(served) == 0
        store(served)
    shutil.copy(models.resolve_model(EXACT.reference).path, other)
    with other.open("r+b") as file:
        file.seek(other.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with served_with(str(files), place, run_root, model=EXACT.model_copy(update={"reference": str(other)})) as served:
        (answer,) = ask(served, [LONG[0].prompt_ids], OUTPUT_TOKENS, "ann").answers
        assert answer.cached_tokens == 0
        assert served.state().storage.fetched_pages == 0
    with served_with(str(files), place, run_root) as served:
        assert cached(served) == EVERYTHING


@pytest.mark.extended
def test_answers_are_the_same_from_redis_while_it_dies_and_when_it_is_back(place: Path, run_root: Path) -> None:
    redis = RedisProcess(place)
    redis.start()
    try:
        with served_with(redis.url, place, run_root) as served:
            assert cached(served) == 0
            store(served)
            flush(served)
            assert cached(served) == EVERYTHING
            redis.kill()
            flush(served)
            assert cached(served) == 0
            flush(served)
            assert cached(served) == 0
            redis.start()

            # What was stored went with the old server; by and by the new one has it.
            def is_stored_again() -> bool:
                flush(served)
                return cached(served) == EVERYTHING

            wait_until(is_stored_again, timeout_s=120)
    finally:
        redis.kill()
