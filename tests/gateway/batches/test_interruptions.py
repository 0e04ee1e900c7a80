"""Batches and uploads whose gateway hangs or dies, and clocks that are set back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import QueueFullError
from common.settings import BatchesSettings
from gateway.batches import runner as runner_module
from gateway.batches.batches import LEASE_S
from gateway.batches.contents import DocumentContents
from gateway.batches.files import INDEX, RESERVED_S, FileBounds, FileOwner, Files
from gateway.batches.lines import split_lines
from gateway.batches.runner import BatchRun, LineBounds
from gateway.batches.sqlite_documents import SqliteDocuments
from gateway.batches.turns import LineTurns
from tests.gateway.batches.test_batches import content, create, ended, line, running
from tests.gateway.support import FakedGateway, gateway_saying

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.batches.batches import BatchRecord

OWNER = FileOwner("default", "local")
OTHER = FileOwner("globex", "user/eve")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)


def run_of(gateway: FakedGateway, batch: BatchRecord) -> BatchRun:
    context = gateway.context
    bounds = LineBounds(4, 100, 10_000)
    return BatchRun(batch, gateway.app, context.batches, context.files, bounds, LineTurns(4))


async def folders(gateway: FakedGateway) -> set[str]:
    documents = gateway.context.batches._documents
    assert isinstance(documents, SqliteDocuments)
    return await documents._run(
        lambda: {folder for (folder,) in documents._database.execute("SELECT DISTINCT folder FROM documents")}
    )


async def closed(gateway: FakedGateway) -> None:
    """Wait until no batch is left to work on."""
    async with asyncio.timeout(60):
        while True:
            if not await gateway.context.batches.open_ids():
                return
            await asyncio.sleep(0.01)


class Hanging:
    """Stops a batch's gateway at its n-th write to an output file, until it is released."""

    def __init__(self, run: BatchRun, writes: int) -> None:
        self.hangs = asyncio.Event()
        self.released = asyncio.Event()
        self._writes = writes
        self._write = run._write_outputs
        run._write_outputs = self._write_outputs  # type: ignore[method-assign]  # the place of the test

    async def _write_outputs(self, end: str, outputs: Any, errors: Any) -> tuple[int, int]:  # Any: only wrapped
        write = outputs.write

        async def write_slowly(part: bytes) -> None:
            self._writes -= 1
            if self._writes == 0:
                self.hangs.set()
                await self.released.wait()
            await write(part)

        outputs.write = write_slowly
        return await self._write(end, outputs, errors)


@pytest.mark.parametrize("writes", [1, 2, 3])
async def test_a_gateway_that_hung_does_not_harm_what_another_has_written(writes: int) -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(number) for number in range(3)])
    hung = run_of(gateway, await gateway.context.batches.get(OWNER, batch_id))
    hanging = Hanging(hung, writes)
    running_late = asyncio.create_task(hung.run())
    await hanging.hangs.wait()
    # Another gateway takes the batch over and ends it.
    async with running(gateway):
        batch = await ended(gateway, batch_id)
        await closed(gateway)
    hanging.released.set()
    with pytest.raises(runner_module._LeaseLostError):
        await running_late
    outputs = await content(gateway, batch["output_file_id"])
    assert [each["custom_id"] for each in outputs] == ["line-0", "line-1", "line-2"]
    listed = (await gateway.get("/v1/files?purpose=batch_output")).json()["data"]
    assert [file["id"] for file in listed] == [batch["output_file_id"]]
    contents = {folder for folder in await folders(gateway) if folder.startswith("content:")}
    assert contents == {f"content:{batch['output_file_id']}", f"content:{batch['input_file_id']}"}


async def test_files_that_a_dead_gateway_had_begun_to_write_are_replaced() -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(number) for number in range(3)])
    dying = run_of(gateway, await gateway.context.batches.get(OWNER, batch_id))
    hanging = Hanging(dying, 2)
    dead = asyncio.create_task(dying.run())
    await hanging.hangs.wait()
    drafts = (await gateway.context.batches.get(OWNER, batch_id)).drafts
    for draft in drafts:
        writer = gateway.context.files.writer(draft)
        await writer.write(b"half")
        await writer.finish()
    dead.cancel()
    await asyncio.gather(dead, return_exceptions=True)
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["output_file_id"] not in drafts
    assert len(await content(gateway, batch["output_file_id"])) == 3
    assert not {f"content:{draft}" for draft in drafts} & await folders(gateway)


@pytest.mark.parametrize("added", [0, 1])
async def test_outputs_are_added_by_the_next_gateway_if_one_dies_once_they_are_written(
    added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_saying("x")
    lines = [line(0), line(1, max_tokens="many")]
    batch_id = await create(gateway, lines)
    files = gateway.context.files
    add, calls = files.add, 0

    async def add_until_death(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == added + 1:
            raise KeyboardInterrupt
        return await add(*given)

    monkeypatch.setattr(files, "add", add_until_death)
    dying = run_of(gateway, await gateway.context.batches.get(OWNER, batch_id))
    with pytest.raises(KeyboardInterrupt):
        await dying.run()
    assert (await gateway.context.batches.get(OWNER, batch_id)).status == "finalizing"
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert [each["custom_id"] for each in await content(gateway, batch["output_file_id"])] == ["line-0"]
    assert [each["custom_id"] for each in await content(gateway, batch["error_file_id"])] == ["line-1"]
    assert len((await gateway.get("/v1/files")).json()["data"]) == 3


async def test_a_clock_that_is_set_back_does_not_keep_a_dead_gateways_lease() -> None:
    gateway = gateway_saying("x")
    batches, now = gateway.context.batches, 1_000_000.0
    batches.clock = lambda: now
    batch_id = await create(gateway, [line(0)])
    assert await batches.claim(batch_id, "one") is not None
    assert await batches.claim(batch_id, "two") is None
    now -= LEASE_S / 2
    assert await batches.claim(batch_id, "two") is not None, "no lease of this clock ends so late"
    now += LEASE_S - 1
    assert await batches.claim(batch_id, "three") is None


def files_of(documents: SqliteDocuments, now: list[float]) -> Files:
    bounds = FileBounds(2000, 10_000, 100 * RESERVED_S)
    return Files(documents, DocumentContents(documents), bounds, lambda: now[0])


async def test_uploads_at_the_same_time_do_not_exceed_the_room_together() -> None:
    documents = SqliteDocuments(None)
    files = files_of(documents, [0.0])
    done = await asyncio.gather(*(files.reserve(OWNER, 500) for _ in range(20)), return_exceptions=True)
    # A tenant has half of the room, of which each takes 1,524 bytes. All may be refused, as each sees the others.
    assert len([each for each in done if isinstance(each, QueueFullError)]) >= 20 - 3
    await files.discard(await files.reserve(OTHER, 500))
    for new in done:
        if not isinstance(new, BaseException):
            await files.discard(new)
    assert len([await files.reserve(OWNER, 500) for _ in range(3)]) == 3


async def test_what_a_dead_gateway_has_received_of_an_upload_is_dropped() -> None:
    documents, now = SqliteDocuments(None), [1000.0]
    files = files_of(documents, now)
    lost, kept = [await files.reserve(OWNER, 500) for _ in range(2)]
    for new in (lost, kept):
        writer = files.writer(new.id)
        await writer.write(b"x" * 500)
        await writer.finish()
    await files.add(OWNER, kept, "kept", "batch", 500)
    # As if the gateway had died before it removed the reservation.
    await documents.put(INDEX, kept.reservation, await documents.get(INDEX, lost.reservation) or b"")
    await files.sweep()
    assert len(await documents.names(INDEX)) == 3
    now[0] += RESERVED_S
    await files.sweep()
    assert await documents.names(f"content:{lost.id}") == []
    assert b"".join([piece async for piece in files.content(kept.id)]) == b"x" * 500
    assert [file["id"] for file in await files.all_of(OWNER)] == [kept.id]
    assert len(await documents.names(INDEX)) == 1


async def test_a_file_that_is_added_twice_stays_in_the_index() -> None:
    documents = SqliteDocuments(None)
    files = files_of(documents, [0.0])
    new = await files.reserve(OWNER, 5)
    assert await files.add(OWNER, new, "a", "batch", 5) == await files.add(OWNER, new, "a", "batch", 5)
    assert len(await documents.names(INDEX)) == 1


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_are_split_and_cut_wherever_pieces_end(size: int) -> None:
    whole = b"a\n\n" + b"b" * 25 + b"\r\n  \nccc\n" + b"d" * 100

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    found = [each async for each in split_lines(pieces(), 10)]
    assert found == [b"a", b"b" * 11, b"ccc", b"d" * 11]


async def test_bytes_that_are_no_utf_8_fail_the_batch_with_their_line() -> None:
    gateway = gateway_saying("x", batches=BatchesSettings())
    good, bad = json.dumps(line(0)).encode(), json.dumps(line(1)).encode().replace(b"Line 1", b"\xff\xfe")
    async with gateway.client() as client:
        sent = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", good + b"\n" + bad)})
    body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = (await gateway.post("/v1/batches", body)).json()["id"]
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["status"] == "failed"
    assert [(error["line"], error["code"]) for error in batch["errors"]["data"]] == [(2, "invalid_json_line")]
