"""Contents of files in object stores: whole or not at all, and batches through an outage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from common.errors import ConfigurationError, UnavailableError
from common.settings import BatchesSettings
from gateway.batches import batches as batches_module
from gateway.batches import runner as runner_module
from gateway.batches.object_contents import UNAVAILABLE, ObjectContents
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.gateway.batches.test_batches import ANN, BOB, content, create, ended, line, retrieve, running, upload
from tests.gateway.support import error_of, gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


class Upload:
    """An object that appears when it is committed, as an upload in parts does."""

    def __init__(self, store: FaultyStore, path: str) -> None:
        self._store, self._path, self._parts = store, path, b""

    def write(self, part: bytes) -> None:
        self._store.check()
        self._parts += part

    def close(self) -> None:
        self._store.check()

    def commit(self) -> None:
        self._store.check()
        self._store.pipe_file(self._path, self._parts)

    def discard(self) -> None:
        self._store.check()
        FaultyStore.discarded += 1


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that can be out of order."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012  (as fsspec declares it)
    pseudo_dirs = [""]  # noqa: RUF012  (likewise)
    is_down = False
    discarded = 0

    def check(self) -> None:
        if FaultyStore.is_down:
            raise ConnectionError("the store does not answer")

    def open(self, path: str, mode: str = "rb", **given: Any) -> Any:
        self.check()
        if mode == "rb" or "data" in given:
            return super().open(path, mode, **given)
        assert given == {"autocommit": False}
        return Upload(self, path)

    def rm_file(self, path: str) -> None:
        self.check()
        super().rm_file(path)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    monkeypatch.setattr(runner_module, "LEAST_WAIT_S", 0.01)
    monkeypatch.setattr(batches_module, "LEASE_S", 0.2)
    monkeypatch.setattr(runner_module, "RENEW_S", 0.05)
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    FaultyStore.store.clear()
    FaultyStore.is_down, FaultyStore.discarded = False, 0


def objects() -> list[str]:
    return sorted(FaultyStore.store)


SETTINGS = BatchesSettings(object_store="faulty://bucket/prefix")


@pytest.mark.parametrize("kind", ["faulty", "file"])
async def test_contents_appear_as_a_whole(kind: str, tmp_path: Path) -> None:
    contents = ObjectContents("faulty://bucket/prefix" if kind == "faulty" else f"file://{tmp_path}/files")

    async def read() -> bytes:
        return b"".join([piece async for piece in contents.read("file-1")])

    first = contents.writer("file-1")
    await first.write(b"a" * 300_000)
    assert await read() == b""
    await first.write(b"b")
    assert first.size == 300_001
    await first.finish()
    assert await read() == b"a" * 300_000 + b"b"
    # One that is not finished, of another gateway perhaps, changes nothing.
    second, third = contents.writer("file-1"), contents.writer("file-1")
    await second.write(b"c")
    await third.write(b"d")
    await second.discard()
    assert await read() == b"a" * 300_000 + b"b"
    await third.finish()
    await third.discard()
    assert await read() == b"d"
    await contents.delete("file-1")
    await contents.delete("file-1")
    assert await read() == b""
    assert not await asyncio.to_thread(lambda: list(tmp_path.glob("files/*")))
    empty = contents.writer("file-2")
    await empty.finish()
    assert [piece async for piece in contents.read("file-2")] == []
    await contents.close()


def test_a_store_that_is_not_known_is_refused_at_start() -> None:
    with pytest.raises(ConfigurationError, match="object_store nothing://bucket"):
        ObjectContents("nothing://bucket")


async def test_files_and_batches_keep_their_contents_in_the_store() -> None:
    gateway = gateway_saying("Hi", batches=SETTINGS)
    async with running(gateway):
        batch = await ended(gateway, await create(gateway, [line(0), line(1)]))
    assert batch["status"] == "completed"
    assert len(await content(gateway, batch["output_file_id"])) == 2
    ids = [batch["input_file_id"], batch["output_file_id"]]
    assert objects() == sorted(f"faulty://bucket/prefix/{file_id}" for file_id in ids)
    async with gateway.client() as client:
        for file_id in ids:
            assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
    assert objects() == []


async def test_other_owners_find_no_object(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    save_keys(path, [ApiKey(name, hash_of(name), "acme") for name in ("ann", "bob")])
    gateway = gateway_saying("x", batches=SETTINGS, keys_file=path)
    file_id = (await upload(gateway, b"secret", ANN)).json()["id"]
    assert (await gateway.get(f"/v1/files/{file_id}/content", BOB)).status_code == 404
    assert (await gateway.get("/v1/files", BOB)).json()["data"] == []
    assert (await gateway.get(f"/v1/files/{file_id}/content", ANN)).content == b"secret"


async def test_an_outage_is_answered_with_503_and_leaves_nothing_behind() -> None:
    gateway = gateway_saying("x", batches=SETTINGS)
    file_id = (await upload(gateway, b"content")).json()["id"]
    FaultyStore.is_down = True
    async with gateway.client() as client:
        for response in (
            await upload(gateway, b"more"),
            await client.get(f"/v1/files/{file_id}/content"),
            await client.delete(f"/v1/files/{file_id}"),
        ):
            assert error_of(response, 503)["message"] == UNAVAILABLE
            assert response.headers["x-should-retry"] == "true"
    FaultyStore.is_down = False
    assert objects() == [f"faulty://bucket/prefix/{file_id}"]
    assert [file["id"] for file in (await gateway.get("/v1/files")).json()["data"]] == [file_id]
    assert (await gateway.get(f"/v1/files/{file_id}/content")).content == b"content"


async def test_an_upload_that_fails_on_the_way_is_dropped() -> None:
    contents = ObjectContents("faulty://bucket/prefix")
    writer = contents.writer("file-1")
    await writer.write(b"a")
    FaultyStore.is_down = True
    with pytest.raises(UnavailableError):
        await writer.write(b"b")
    FaultyStore.is_down = False
    await writer.discard()
    assert (FaultyStore.discarded, objects()) == (1, [])


@pytest.mark.parametrize("when", ["validating", "finalizing"])
async def test_a_batch_goes_on_after_an_outage(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = gateway_saying("Hi", batches=SETTINGS)
    batch_id = await create(gateway, [line(number) for number in range(3)])
    if when == "validating":
        FaultyStore.is_down = True
    else:
        write = Upload.write

        def fail(upload: Upload, part: bytes) -> None:
            FaultyStore.is_down = True
            monkeypatch.setattr(Upload, "write", write)
            write(upload, part)

        monkeypatch.setattr(Upload, "write", fail)
    async with running(gateway):
        await until(lambda: FaultyStore.is_down)
        # Longer than a lease.
        await asyncio.sleep(0.5)
        assert (await retrieve(gateway, batch_id))["status"] == when
        FaultyStore.is_down = False
        batch = await ended(gateway, batch_id)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert sorted(each["custom_id"] for each in await content(gateway, batch["output_file_id"])) == [
        "line-0", "line-1", "line-2",
    ]  # fmt: skip
