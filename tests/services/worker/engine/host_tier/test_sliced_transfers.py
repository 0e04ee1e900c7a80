from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.transfers import Transfer, TransferDirection, TransferId
from services.worker.engine.host_tier import sliced_transfers
from services.worker.engine.host_tier.pool import HostPool, allocate_host_pool
from services.worker.engine.host_tier.sliced_transfers import SLICE_PAGES, SlicedTransfers
from services.worker.engine.kernels.interface import AttentionShape, KvLayout
from services.worker.engine.model.kv_pool import KvPool, allocate_pool
from tests.services.worker.engine.scenario import ids

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKUP, LOAD = TransferDirection.DEVICE_TO_HOST, TransferDirection.HOST_TO_DEVICE

SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=8, page_size=4)
ROWS = AttentionShape(query_heads=4, kv_heads=1, head_dim=24, page_size=4, latent_dim=16)
# Of one layer beside others of `SHAPE`.
OTHER = AttentionShape(query_heads=4, kv_heads=4, head_dim=6, page_size=4)


class Rig:
    def __init__(
        self,
        layout: KvLayout = KvLayout.TOKEN_MAJOR,
        dtype: torch.dtype = torch.float32,
        shapes: tuple[AttentionShape, ...] = (SHAPE,) * 3,
    ) -> None:
        self.pool: KvPool = pool_of(shapes, 40, layout, dtype, torch.device("cpu"))
        self.host: HostPool = allocate_host_pool(self.pool, 50)
        generator = torch.Generator().manual_seed(0)
        for layer in self.pool.layers:
            for tensor in layer.stored:
                tensor.normal_(generator=generator)
        # A clock on which every look takes a slice's time.
        self.now = 0.0
        self.transfers = SlicedTransfers(self.pool, self.host, self.clock)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def begin(self, number: int, direction: TransferDirection, device: list[int], host: list[int]) -> None:
        self.transfers.begin([Transfer(TransferId(number), direction, ids(device), ids(host))])

    def finish(self) -> list[int]:
        done: list[int] = []
        while acks := self.transfers.wait():
            done += [ack.transfer_id for ack in acks]
        return done

    def content(self, page: int) -> list[torch.Tensor]:
        return [tensor[page].clone() for layer in self.pool.layers for tensor in layer.stored]


def pool_of(
    shapes: Sequence[AttentionShape], pages: int, layout: KvLayout, dtype: torch.dtype, device: torch.device
) -> KvPool:
    """Return a pool of layers of these shapes."""
    layers = [
        layer for shape in shapes for layer in allocate_pool(shape, 1, pages, layout, dtype=dtype, device=device).layers
    ]
    return KvPool(layers, pages, shapes[0].page_size)


KINDS = [
    *((layout, shapes) for layout in KvLayout for shapes in ((SHAPE,) * 3, (SHAPE, OTHER, SHAPE))),
    (KvLayout.TOKEN_MAJOR, (ROWS,) * 3),
]


@pytest.mark.parametrize(("layout", "shapes"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_unchanged_after_a_backup_and_a_load(
    layout: KvLayout, shapes: tuple[AttentionShape, ...], dtype: torch.dtype
) -> None:
    rig = Rig(layout, dtype, shapes)
    device = np.random.default_rng(0).permutation(40)[:21].tolist()
    before = [rig.content(page) for page in device]
    untouched = rig.content(next(page for page in range(40) if page not in device))
    rig.begin(1, BACKUP, device, list(range(29, 50)))
    assert rig.finish() == [1]
    for layer in rig.pool.layers:
        for tensor in layer.stored:
            tensor[device] = 7.0
    # Each page into another place than it came from.
    rig.begin(2, LOAD, device[::-1], list(range(29, 50)))
    assert rig.finish() == [2]
    for page, content in zip(device[::-1], before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(rig.content(page), content, strict=True))
    page = next(page for page in range(40) if page not in device)
    assert all(torch.equal(one, other) for one, other in zip(rig.content(page), untouched, strict=True))


def test_a_long_backup_does_not_hold_up_decoding() -> None:
    rig = Rig()
    rig.begin(1, BACKUP, list(range(40)), list(range(40)))
    polls = 1
    while not rig.transfers.poll():
        polls += 1
    slices = 40 // SLICE_PAGES
    assert polls >= slices // 2, "a poll copies no more than its time allows"


def test_loads_go_before_backups() -> None:
    rig = Rig()
    rig.begin(1, BACKUP, list(range(30)), list(range(30)))
    rig.begin(2, LOAD, list(range(30, 40)), list(range(30, 40)))
    assert rig.finish() == [2, 1]


def test_voided_transfers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(sliced_transfers, "BACKUP_BUDGET_S", 0.001)
    rig.begin(1, BACKUP, list(range(40)), list(range(40)))
    assert rig.transfers.poll() == ()
    rig.transfers.reset()
    assert rig.finish() == []
    assert not rig.host.memory[39].any()
    rig.begin(2, BACKUP, [3], [5])
    assert rig.finish() == [2]


def test_the_duration_of_a_copy_is_reported() -> None:
    rig = Rig()
    rig.begin(1, LOAD, list(range(16)), list(range(16)))
    (ack,) = rig.transfers.wait()
    assert (ack.done_pages, ack.duration_us) == (16, 2000)
