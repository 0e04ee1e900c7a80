from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.transfers import Transfer, TransferDirection, TransferId
from services.worker.engine.host_tier.pool import HostPool, allocate_host_pool
from services.worker.engine.host_tier.stream_transfers import StreamTransfers, TorchPageMover, make_mover, runs
from services.worker.engine.kernels.interface import AttentionShape, KvLayout
from services.worker.engine.model.kv_pool import KvPool, allocate_pool
from tests.services.worker.engine.host_tier.test_sliced_transfers import OTHER, SHAPE, pool_of
from tests.services.worker.engine.scenario import ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.worker.engine.host_tier.stream_transfers import PageMover

BACKUP, LOAD = TransferDirection.DEVICE_TO_HOST, TransferDirection.HOST_TO_DEVICE
PAGES, HOST_PAGES = 96, 128


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([5], [(0, 5, 1)]),
        ([5, 6, 7], [(0, 5, 3)]),
        ([7, 6, 5], [(0, 7, 1), (1, 6, 1), (2, 5, 1)]),
        ([1, 2, 9, 10, 4], [(0, 1, 2), (2, 9, 2), (4, 4, 1)]),
        # Pages 8 and 16 begin ranges that are locked by themselves.
        ([6, 7, 8, 9, 15, 16], [(0, 6, 2), (2, 8, 2), (4, 15, 1), (5, 16, 1)]),
        ([0, 1], [(0, 0, 2)]),
    ],
)
def test_consecutive_pages_are_copied_together(pages: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert runs(ids(pages), border=8) == expected


@pytest.mark.parametrize("make", [TorchPageMover, make_mover])
@pytest.mark.parametrize("layout", KvLayout)
@pytest.mark.parametrize("middle", [SHAPE, OTHER], ids=["alike", "differing"])
def test_scattered_pages_pass_through_staging_unchanged(
    layout: KvLayout, middle: AttentionShape, make: Callable[[KvPool], PageMover], device: torch.device
) -> None:
    pool = pool_of((SHAPE, middle, SHAPE), 10, layout, torch.bfloat16, device)
    for layer in pool.layers:
        layer.keys.normal_()
        layer.values.normal_()
    staging = torch.zeros_like(allocate_host_pool(pool, 4).memory, device=device)
    pages = torch.tensor([7, 2, 9], device=device)
    before = [tensor[pages].clone() for layer in pool.layers for tensor in (layer.keys, layer.values)]
    mover = make(pool)
    mover.gather(pages, staging)
    # A page in staging is what the host tier takes it for.
    last = pool.layers[2].values[2].flatten()
    assert torch.equal(staging[1].flatten()[-len(last) :], last)
    assert not staging[3].any()
    for layer in pool.layers:
        layer.keys.zero_()
        layer.values.zero_()
    mover.scatter(pages, staging)
    after = [tensor[pages] for layer in pool.layers for tensor in (layer.keys, layer.values)]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    assert not pool.layers[0].keys[[0, 1, 3, 4, 5, 6, 8]].any()


@pytest.fixture
def device() -> torch.device:
    """The GPU, or without one the CPU, where Triton's interpreter runs the programs if it is installed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Rig:
    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        shape = AttentionShape(query_heads=8, kv_heads=4, head_dim=64, page_size=16)
        self.pool: KvPool = allocate_pool(
            shape, layers=6, pages=PAGES, layout=KvLayout.TOKEN_MAJOR, dtype=torch.bfloat16, device=self.device
        )
        self.host: HostPool = allocate_host_pool(self.pool, HOST_PAGES)
        for layer in self.pool.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.transfers = StreamTransfers(self.pool, self.host, self.device)

    def begin(self, number: int, direction: TransferDirection, device: list[int], host: list[int]) -> None:
        self.transfers.begin([Transfer(TransferId(number), direction, ids(device), ids(host))])

    def finish(self, count: int = 1) -> list[int]:
        done: list[int] = []
        end = time.monotonic() + 20
        while len(done) < count and time.monotonic() < end:
            done += [ack.transfer_id for ack in self.transfers.wait()]
        return done

    def content(self, pages: list[int]) -> list[torch.Tensor]:
        return [tensor[pages].clone() for layer in self.pool.layers for tensor in (layer.keys, layer.values)]

    def fill(self, pages: list[int], value: float) -> None:
        for layer in self.pool.layers:
            layer.keys[pages] = value
            layer.values[pages] = value


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.transfers.close()


@pytest.mark.gpu
def test_pages_are_unchanged_after_a_backup_and_a_load(rig: Rig) -> None:
    device = np.random.default_rng(0).permutation(PAGES)[:70].tolist()
    host = np.random.default_rng(1).permutation(HOST_PAGES)[:70].tolist()
    before = rig.content(device)
    rig.begin(1, BACKUP, device, host)
    assert rig.finish() == [1]
    rig.fill(device, 7.0)
    rig.begin(2, LOAD, device[::-1], host[::-1])
    assert rig.finish() == [2]
    assert all(torch.equal(one, other) for one, other in zip(rig.content(device), before, strict=True))


@pytest.mark.gpu
def test_a_backup_waits_for_the_writes_of_earlier_passes(rig: Rig) -> None:
    pages = list(range(40))
    busy = torch.randn(4096, 4096, device=rig.device)
    for _ in range(30):
        busy = busy @ busy / 64
    rig.fill(pages, 3.0)
    rig.begin(1, BACKUP, pages, pages)
    assert rig.finish() == [1]
    assert bool((rig.host.memory[:40] == 3.0).all())


@pytest.mark.gpu
def test_a_load_does_not_overwrite_pages_that_earlier_passes_still_read(rig: Rig) -> None:
    pages = list(range(40))
    rig.fill(pages, 1.0)
    busy = torch.randn(4096, 4096, device=rig.device)
    for _ in range(30):
        busy = busy @ busy / 64
    read = rig.content(pages)
    rig.begin(1, LOAD, pages, pages)
    assert rig.finish() == [1]
    assert all(bool((tensor == 1.0).all()) for tensor in read)
    assert all(not tensor.any() for tensor in rig.content(pages))


@pytest.mark.gpu
def test_passes_do_not_wait_for_copies(rig: Rig) -> None:
    """Asking for what is done never waits, and what is launched meanwhile runs on another stream."""
    rig.begin(1, BACKUP, list(range(PAGES)), list(range(PAGES)))
    started = time.perf_counter()
    rig.transfers.poll()
    assert time.perf_counter() - started < 0.05
    assert rig.finish() == [1]


@pytest.mark.gpu
def test_both_directions_complete_and_voided_transfers_are_not_acknowledged(rig: Rig) -> None:
    rig.begin(1, BACKUP, list(range(40)), list(range(40)))
    rig.begin(2, LOAD, list(range(40, 80)), list(range(60, 100)))
    assert sorted(rig.finish(2)) == [1, 2]
    rig.begin(3, BACKUP, list(range(40)), list(range(40)))
    rig.transfers.reset()
    assert rig.transfers.wait() == ()
