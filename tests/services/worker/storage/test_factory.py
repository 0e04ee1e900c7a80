"""The choice of a back end by the location in the settings."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from common.errors import ConfigurationError
from common.settings import WorkerStorageSettings
from services.worker.storage import factory
from services.worker.storage.factory import STORAGE_THREADS, make_storage
from services.worker.storage.files import FileStorage
from services.worker.storage.interface import StorageError
from services.worker.storage.redis_server import RedisStorage
from tests.fakes.storage import FakeStorage

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.storage.interface import Storage


class MemoryStorage(FakeStorage):
    """The back end of another package."""

    def __init__(self, url: str, timeout_s: float, threads: int) -> None:
        super().__init__()
        if not url.endswith("/segment"):
            raise StorageError("no segment")
        self.given = url, timeout_s, threads


def settings_of(location: str | Path) -> WorkerStorageSettings:
    return WorkerStorageSettings(location=SecretStr(str(location)), timeout_s=3.0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        points = {"memory": f"{__name__}:MemoryStorage", "broken": f"{__name__}:Nothing"}
        return [EntryPoint(*point, group) for point in points.items()] if group == "pando.storage" else []

    monkeypatch.setattr(factory, "entry_points", entry_points)


def made(location: str | Path) -> Storage | None:
    return make_storage(settings_of(location))


def test_without_a_location_there_is_no_storage() -> None:
    assert make_storage(WorkerStorageSettings()) is None


def test_a_path_is_a_directory(tmp_path: Path) -> None:
    assert isinstance(made(tmp_path / "pages"), FileStorage)


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///s", "redis+cluster://h,i", "redis+sentinel://h/s"])
def test_urls_of_redis_need_no_server_at_the_start(url: str) -> None:
    assert isinstance(made(url), RedisStorage)


@pytest.mark.usefixtures("installed")
def test_another_package_may_bring_a_back_end() -> None:
    storage = made("memory://host/segment")
    assert isinstance(storage, MemoryStorage)
    assert storage.given == ("memory://host/segment", 3.0, STORAGE_THREADS)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("memory://host", "no segment"),
        ("broken://host", "cannot be loaded"),
        ("memcached://host", "a directory or a URL: .*redis[+]sentinel://…, .*memory://…"),
    ],
)
def test_a_location_that_cannot_be_used_is_an_error_at_the_start(url: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"worker.storage.location: .*{reason}"):
        made(url)
