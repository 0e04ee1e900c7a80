from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from services.worker.engine.host_tier.cuda_sharing import CudaSharing
from services.worker.engine.host_tier.device_pages import DevicePages, page_form_of
from services.worker.engine.host_tier.shared_pages import (
    Borrowers,
    MappedPages,
    SharedPages,
    SharingError,
    share_pages,
)
from services.worker.engine.kernels.interface import KvLayout
from services.worker.engine.model.kv_pool import KvPool, allocate_pool
from services.worker.engine.parallel.shards import Span
from services.worker.wire import shared_pages_from_wire, shared_pages_to_wire
from tests.services.worker.engine.host_tier.test_sliced_transfers import OTHER, SHAPE, pool_of


def make_pool() -> KvPool:
    return allocate_pool(
        SHAPE, layers=3, pages=5, layout=KvLayout.TOKEN_MAJOR, dtype=torch.float32, device=torch.device("cpu")
    )


class Segments:
    """Shares memory in allocations of 4 KiB; opened ones are a million bytes further."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.opened: list[int] = []
        self._fails_at = fails_at

    def export(self, address: int) -> tuple[bytes, int]:
        if self._fails_at == 0:
            raise SharingError("it cannot be exported")
        return (address & ~4095).to_bytes(8, "little"), address & 4095

    def open(self, handle: bytes) -> int:
        if len(self.opened) == self._fails_at:
            raise SharingError("it cannot be mapped")
        self.opened.append(int.from_bytes(handle, "little") + 1_000_000)
        return self.opened[-1]

    def close(self, address: int) -> None:
        self.opened.remove(address)


def test_every_tensor_is_found_in_the_memory_of_another_process() -> None:
    pool, sharing = make_pool(), Segments()
    tensors = [tensor for layer in pool.layers for tensor in layer.stored]
    addresses = [tensor.data_ptr() for tensor in tensors]
    memory = share_pages(b"n" * 16, addresses, 5, tensors[0][0].nbytes, sharing)
    assert len(set(memory.allocations)) == len(memory.allocations)
    mapped = MappedPages(memory, sharing)
    assert mapped.addresses == tuple(address + 1_000_000 for address in addresses)
    mapped.close()
    assert sharing.opened == []
    assert shared_pages_from_wire(shared_pages_to_wire(memory)) == memory


def test_memory_of_which_a_part_cannot_be_mapped_is_unmapped() -> None:
    memory = SharedPages(b"n" * 16, 1, 8, (bytes(8), b"\1" * 8), ((0, 0), (1, 8)))
    sharing = Segments(fails_at=1)
    with pytest.raises(SharingError):
        MappedPages(memory, sharing)
    assert sharing.opened == []


def test_a_pool_is_lent_until_it_is_closed_and_has_a_name_of_its_own() -> None:
    form = page_form_of(make_pool(), KvLayout.TOKEN_MAJOR, SHAPE, Span(0, 2), 2)
    assert form is not None
    names = set()
    for _ in range(2):
        pages = DevicePages(make_pool(), form, Segments())
        assert pages.shared_name is None
        memory = pages.lend(lambda: None)
        assert memory is not None
        assert memory is pages.lend(print)
        names.add(memory.name)
        assert pages.shared_name == memory.name
    assert len(names) == 2
    recalled = threading.Event()
    pages = DevicePages(make_pool(), form, Segments())

    def recall() -> None:
        recalled.set()
        threading.Timer(0.05, pages.take_back, [recall]).start()

    assert pages.lend(recall)
    pages.close()
    assert recalled.is_set()
    assert pages.lend(recall) is None


def test_memory_that_cannot_be_exported_is_not_lent() -> None:
    form = page_form_of(make_pool(), KvLayout.TOKEN_MAJOR, SHAPE, Span(0, 2), 2)
    assert form is not None
    for sharing in (None, Segments(fails_at=0)):
        pages = DevicePages(make_pool(), form, sharing)
        assert pages.lend(lambda: None) is None
        pages.close()


def test_a_pool_of_layers_that_differ_is_not_lent() -> None:
    pool = pool_of((SHAPE, OTHER, SHAPE), 5, KvLayout.TOKEN_MAJOR, torch.float32, torch.device("cpu"))
    form = page_form_of(pool, KvLayout.TOKEN_MAJOR, SHAPE, Span(0, 2), 2)
    assert form is not None
    pages = DevicePages(pool, form, Segments())
    assert pages.lend(lambda: None) is None, "mapped tensors have pages of one size"
    pages.close()


def test_readers_that_keep_memory_mapped_are_waited_for_in_bounded_time() -> None:
    borrowers = Borrowers(recall_s=0.05)
    recalls: list[int] = []
    assert borrowers.add(lambda: recalls.append(1))
    assert not borrowers.close()
    assert recalls == [1]
    assert not borrowers.add(print)


def test_without_a_driver_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: there is no such library")

    monkeypatch.setattr(ctypes, "CDLL", load)
    sharing = CudaSharing(0)
    for use in (lambda: sharing.export(4096), lambda: sharing.open(bytes(64)), lambda: sharing.close(4096)):
        with pytest.raises(SharingError, match="no such library"):
            use()
