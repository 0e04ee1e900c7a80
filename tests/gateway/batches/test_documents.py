"""What the storages of files and batches have in common."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from gateway.batches.contents import DocumentContents
from gateway.batches.files import FileBounds, FileOwner, Files
from gateway.batches.redis_documents import RedisDocuments
from gateway.batches.sqlite_documents import SqliteDocuments
from tests.fakes.redis_process import temporary_redis
from tests.gateway.state.servers import new_prefix, state_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from gateway.batches.documents import Documents
    from tests.fakes.redis_process import RedisProcess

OWNER = FileOwner("acme", "user/ann")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process


@asynccontextmanager
async def opened(kind: str, redis: RedisProcess, path: Path) -> AsyncIterator[Documents]:
    if kind == "redis":
        async with state_server(redis.url, new_prefix()) as server:
            yield RedisDocuments(server)
    else:
        documents = SqliteDocuments(path / "batches.db" if kind == "file" else None)
        yield documents
        await documents.close()


@pytest.mark.parametrize("kind", ["memory", "file", "redis"])
async def test_documents_are_exchanged_only_if_they_are_as_expected(
    kind: str, redis: RedisProcess, tmp_path: Path
) -> None:
    async with opened(kind, redis, tmp_path) as documents:
        assert await documents.get("folder", "a") is None
        assert await documents.exchange("folder", "a", None, b"")
        assert not await documents.exchange("folder", "a", None, b"two")
        assert await documents.exchange("folder", "a", b"", b"\x00\xff")
        assert not await documents.exchange("folder", "a", b"", b"three")
        await documents.put("folder", "b", b"B")
        await documents.put("other", "c", b"C")
        assert await documents.names("folder") == ["a", "b"]
        assert await documents.get_many("folder", ["b", "x", "a"]) == [b"B", None, b"\x00\xff"]
        assert await documents.exchange("folder", "a", b"\x00\xff", None)
        assert await documents.get("folder", "a") is None
        await documents.delete("folder")
        assert await documents.names("folder") == []
        await documents.delete("other", "c")
        assert await documents.names("other") == []


@pytest.mark.parametrize("kind", ["memory", "file", "redis"])
async def test_files_disappear_when_their_lifetime_is_over(kind: str, redis: RedisProcess, tmp_path: Path) -> None:
    now = 1_000.0
    async with opened(kind, redis, tmp_path) as documents:
        files = Files(documents, DocumentContents(documents), FileBounds(10**6, 10**6, 100.0), lambda: now)
        new = await files.reserve(OWNER, 300_000)
        writer = files.writer(new.id)
        await writer.write(b"x" * 300_000)
        await writer.finish()
        await files.add(OWNER, new, "a", "batch", writer.size)
        await files.sweep()
        assert [file["id"] for file in await files.all_of(OWNER)] == [new.id]
        assert b"".join([piece async for piece in files.content(new.id)]) == b"x" * 300_000
        now += 101.0
        assert await files.all_of(OWNER) == []
        await files.sweep()
        for folder in ("file-index", f"content:{new.id}", f"files:{OWNER.digest}"):
            assert await documents.names(folder) == []
