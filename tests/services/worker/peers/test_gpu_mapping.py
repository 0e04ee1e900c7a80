"""Pages of a GPU are read by another process that maps its memory: what arrives, and what ends a read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from protos.gen.pando.v1 import worker_pb2
from tests.services.worker.engine.parallel.ranks import gpu_of
from tests.services.worker.peers.lender import LEASE, PoolShape, Reader, address_in, start_lender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.worker.peers.mapping import Mapping

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = PoolShape(pages=512)
SCATTERED = np.random.default_rng(0).permutation(SHAPE.pages).tolist()


class Pair:
    """A lender on GPU 1, or on GPU 0 if there is no other, and a reader on GPU 0."""

    def __init__(self, folder: Path, **environment: str) -> None:
        address = address_in(folder)
        self.lender = start_lender(address, SHAPE, gpu_of(1), environment)
        self.reader = Reader(address, SHAPE, torch.device("cuda", 0))

    async def close(self) -> None:
        await self.reader.close()
        self.lender.kill()
        self.lender.join()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path)
    await pair.reader.start()
    yield pair
    await pair.close()


async def until(reader: Reader, *, is_mapped: bool) -> None:
    async with asyncio.timeout(20):
        while reader.has_mapped != is_mapped:  # noqa: ASYNC110  (nothing notifies)
            await asyncio.sleep(0.005)


async def copying(reader: Reader) -> Mapping:
    """Return the mapping as soon as a copy from it is under way."""
    await until(reader, is_mapped=True)
    mapping = reader.reader._mappings._peers[reader.address].mapping.result()
    assert mapping is not None
    async with asyncio.timeout(20):
        while not mapping.copies:  # noqa: ASYNC110  (nothing notifies)
            await asyncio.sleep(0)
    return mapping


async def test_pages_arrive_bit_by_bit_both_ways(pair: Pair) -> None:
    assert (await pair.reader.read(SCATTERED)).done_pages == SHAPE.pages
    assert pair.reader.has_mapped
    assert pair.reader.are_right(SCATTERED, SHAPE.pages)
    assert (await pair.reader.read(SCATTERED[:5], maps=False)).done_pages == 5
    assert pair.reader.are_right(SCATTERED, 5)


@pytest.mark.parametrize("maps", [True, False])
async def test_pages_arrive_on_the_device_bit_by_bit_and_others_stay(pair: Pair, *, maps: bool) -> None:
    reader, heads = pair.reader, pair.reader.own_pages.form.held
    pages = SCATTERED[: SHAPE.pages // 2] if maps else SCATTERED[:9]
    expected = reader.own_pages.read_pages(pages, heads)
    kept = range(len(pages), min(len(pages) + 16, SHAPE.pages))
    before = reader.own_pages.read_pages(kept, heads)
    assert (await reader.read(pages, maps=maps, to_device=True)).done_pages == len(pages)
    assert reader.has_mapped == maps
    assert reader.own_pages.read_pages(range(len(pages)), heads) == expected
    assert reader.own_pages.read_pages(kept, heads) == before


@pytest.mark.parametrize("maps", [True, False])
async def test_pages_are_not_overwritten_before_the_passes_have_read_them(pair: Pair, *, maps: bool) -> None:
    assert (await pair.reader.read([3], to_device=True)).done_pages == 1
    # As integers: pages hold any bits, and what is not a number does not equal itself.
    keys = pair.reader.pool.layers[0].keys.view(torch.int16)
    old = keys[:8].clone()
    torch.cuda.synchronize()
    # A pass that takes long, and then reads.
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # torch has no types for it
    seen = keys[:8].clone()
    assert (await pair.reader.read(SCATTERED[100:108], maps=maps, to_device=True)).done_pages == 8
    torch.cuda.synchronize()
    assert torch.equal(seen, old)
    assert not torch.equal(keys[:8], old)


async def test_a_lease_that_ends_during_a_copy_ends_it_before_its_pages_are_overwritten(pair: Pair) -> None:
    assert (await pair.reader.read([3])).done_pages == 1
    reading = asyncio.create_task(pair.reader.read(SCATTERED))
    mapping = await copying(pair.reader)
    await pair.reader.stub.RevokePages(worker_pb2.RevokePagesRequest(lease=LEASE))
    assert not mapping.copies
    ack = await reading
    assert ack.done_pages < SHAPE.pages
    assert pair.reader.are_right(SCATTERED, ack.done_pages)
    assert (await pair.reader.read([3])).done_pages == 0


async def test_a_peer_that_is_killed_during_a_copy_leaves_this_process_whole(pair: Pair) -> None:
    assert (await pair.reader.read([3])).done_pages == 1
    reading = asyncio.create_task(pair.reader.read(SCATTERED))
    await copying(pair.reader)
    pair.lender.kill()
    ack = await reading
    assert pair.reader.are_right(SCATTERED, ack.done_pages)
    await until(pair.reader, is_mapped=False)
    torch.cuda.synchronize()
    assert (await pair.reader.read([3])).done_pages == 0


async def test_memory_is_unmapped_before_its_owner_frees_it(pair: Pair) -> None:
    assert (await pair.reader.read(SCATTERED)).done_pages == SHAPE.pages
    slept = await pair.reader.stub.Sleep(worker_pb2.WorkerSleepRequest(level=1))
    assert not pair.reader.has_mapped
    assert slept.freed_bytes >= SHAPE.pages << 21


async def test_memory_of_expandable_segments_is_read_as_bytes(tmp_path: Path) -> None:
    pair = Pair(tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    await pair.reader.start()
    assert (await pair.reader.read(SCATTERED[:9])).done_pages == 9
    assert not pair.reader.has_mapped
    assert pair.reader.are_right(SCATTERED, 9)
    await pair.close()
