"""Pages are read from another process over NIXL, with the real package: what arrives, and what ends a read.

Skipped where the package is not installed, as it is large: `make nixl` installs it, on Linux. Needs no GPU.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from protos.gen.pando.v1 import worker_pb2
from services.worker.engine.host_tier.nixl_agents import PACKAGES, NixlAgents
from services.worker.engine.host_tier.nixl_copies import NixlCopies
from services.worker.engine.host_tier.shared_pages import SLICES_AT_ONCE, SharingError
from services.worker.peers import mapping as mappings
from services.worker.peers.leases import SILENCE_S
from tests.services.worker.peers.lender import LEASE, PoolShape, Reader, address_in, start_lender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.steps import PageIds
    from services.worker.engine.host_tier.shared_pages import MappedPages
    from services.worker.peers.mapping import Mapping

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in PACKAGES.values()),
        reason="NIXL is NOT installed: run `make nixl`",
    ),
]

# Half a gigabyte: several permissions of the lender.
SHAPE = PoolShape(pages=256)
SCATTERED = np.random.default_rng(0).permutation(SHAPE.pages).tolist()
CPU = torch.device("cpu")
# As between hosts: the lender's process takes part in each read.
NETWORK = {"UCX_TLS": "tcp"}
READ_S = 1.0


class Pair:
    """A lender and a reader that believe that they are on different hosts."""

    def __init__(self, folder: Path) -> None:
        address = address_in(folder)
        self.lender = start_lender(address, SHAPE, CPU, NETWORK, over_nixl=True)
        self.agents = NixlAgents(read_s=READ_S)
        self.reader = Reader(address, SHAPE, CPU, self.agents)

    async def close(self) -> None:
        self.lender.kill()
        await self.reader.close()
        self.lender.join()


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    for name, value in NETWORK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mappings, "this_host", lambda: "another")
    pair = Pair(tmp_path)
    await pair.reader.start()
    yield pair
    await pair.close()


async def copying(reader: Reader) -> Mapping:
    """Return the mapping as soon as a read is under way."""
    async with asyncio.timeout(20):
        while not reader.has_mapped:  # noqa: ASYNC110  (nothing notifies)
            await asyncio.sleep(0.005)
        mapping = reader.reader._mappings._peers[reader.address].mapping.result()
        assert mapping is not None
        while not mapping.copies:  # noqa: ASYNC110  (nothing notifies)
            await asyncio.sleep(0)
    return mapping


async def test_pages_arrive_bit_by_bit_in_the_host_tier(pair: Pair) -> None:
    assert (await pair.reader.read(SCATTERED)).done_pages == SHAPE.pages
    assert pair.reader.has_mapped
    assert pair.reader.are_right(SCATTERED, SHAPE.pages)
    assert (await pair.reader.read(SCATTERED[:5], maps=False)).done_pages == 5
    assert pair.reader.are_right(SCATTERED, 5)


async def test_pages_arrive_on_the_device_bit_by_bit_and_others_stay(pair: Pair) -> None:
    reader, heads = pair.reader, pair.reader.own_pages.form.held
    pages = [*SCATTERED[:80], *range(100, 116)]
    expected = reader.own_pages.read_pages(pages, heads)
    kept = range(len(pages), SHAPE.pages)
    before = reader.own_pages.read_pages(kept, heads)
    assert (await reader.read(pages, to_device=True)).done_pages == len(pages)
    assert reader.has_mapped
    assert reader.own_pages.read_pages(range(len(pages)), heads) == expected
    assert reader.own_pages.read_pages(kept, heads) == before


async def test_a_lease_that_ends_during_a_read_ends_it_before_its_pages_are_overwritten(pair: Pair) -> None:
    assert (await pair.reader.read([3])).done_pages == 1
    reading = asyncio.create_task(pair.reader.read(SCATTERED))
    mapping = await copying(pair.reader)
    await pair.reader.stub.RevokePages(worker_pb2.RevokePagesRequest(lease=LEASE))
    assert not mapping.copies
    ack = await reading
    assert ack.done_pages < SHAPE.pages
    assert pair.reader.are_right(SCATTERED, ack.done_pages)
    assert (await pair.reader.read([3])).done_pages == 0


async def test_a_peer_that_is_killed_during_a_read_leaves_this_process_whole(pair: Pair) -> None:
    assert (await pair.reader.read([3])).done_pages == 1
    reading = asyncio.create_task(pair.reader.read(SCATTERED))
    await copying(pair.reader)
    pair.lender.kill()
    ack = await reading
    assert ack.done_pages < SHAPE.pages
    assert pair.reader.are_right(SCATTERED, ack.done_pages)
    assert (await pair.reader.read([3])).done_pages == 0


async def test_a_slow_network_breaks_no_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = pair.reader.copies
    assert isinstance(copies, NixlCopies)
    pair.agents._read_s = 60
    copy, copied = copies.copy, list[int]()

    def copy_slowly(source: MappedPages, pages: PageIds, host_pages: PageIds) -> None:
        time.sleep(1.25 * SILENCE_S)
        copy(source, pages, host_pages)
        copied.extend(pages.tolist())

    monkeypatch.setattr(copies, "copy", copy_slowly)
    some = SCATTERED[: 2 * SLICES_AT_ONCE * copies.slice_pages]
    assert (await pair.reader.read(some)).done_pages == len(some)
    assert sorted(copied) == sorted(some), "none was sent over gRPC"
    assert pair.reader.are_right(some, len(some))


async def test_memory_is_not_lent_any_more_when_its_owner_frees_it(pair: Pair) -> None:
    assert (await pair.reader.read([3])).done_pages == 1
    mapping = await _mapping(pair.reader)
    # As a reader that does not notice.
    handle = mapping.pages.memory.allocations[0]
    kept = pair.agents.open(handle)
    await pair.reader.stub.Sleep(worker_pb2.WorkerSleepRequest(level=1))
    assert not pair.reader.has_mapped
    with pytest.raises(SharingError):
        pair.agents.open(handle)
    pair.agents.close(kept)
    assert pair.lender.is_alive()


async def test_nothing_arrives_from_a_peer_that_was_given_up(pair: Pair) -> None:
    assert (await pair.reader.read([3])).done_pages == 1
    reading = asyncio.create_task(pair.reader.read(SCATTERED))
    await copying(pair.reader)
    assert pair.lender.pid is not None
    os.kill(pair.lender.pid, signal.SIGSTOP)
    ack = await reading
    assert ack.done_pages < SHAPE.pages
    assert pair.reader.are_right(SCATTERED, ack.done_pages)
    before = pair.reader.host.memory.clone()
    os.kill(pair.lender.pid, signal.SIGCONT)
    # The package may end the lender, as its reader is gone; either way it has gone on.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await asyncio.Event().wait()
    assert torch.equal(before.view(torch.int16), pair.reader.host.memory.view(torch.int16))


async def test_a_rank_that_wakes_up_goes_on_reading(pair: Pair) -> None:
    assert (await pair.reader.read([3])).done_pages == 1
    assert isinstance(pair.reader.copies, NixlCopies)
    pair.reader.copies.close()
    pair.reader.copies = NixlCopies(pair.reader.pool, pair.reader.host, pair.agents)
    assert (await pair.reader.read(SCATTERED[:40])).done_pages == 40
    assert pair.reader.are_right(SCATTERED, 40)


async def _mapping(reader: Reader) -> Mapping:
    mapping = reader.reader._mappings._peers[reader.address].mapping.result()
    assert mapping is not None
    return mapping
