"""Copies of KV pages that are read over NIXL, from memory of a rank on any host into pages of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.worker.engine.host_tier.nixl_agents import ADDRESS_BITS, MemoryPieces, Region
from services.worker.engine.host_tier.shared_pages import SLICE_BYTES, MappedPages, SharingError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import PageIds
    from services.worker.engine.execution.interface import PeerPageCopies
    from services.worker.engine.host_tier.nixl_agents import NixlAgents
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.host_tier.shared_pages import SharedPages
    from services.worker.engine.model.kv_pool import KvPool

_ADDRESS = (1 << ADDRESS_BITS) - 1


class NixlCopies:
    """Reads pages into the host tier and the device; see `PeerPageCopies`. Memory of GPUs of this host is mapped.

    Reads need no pass of this rank, and no Python of the other one.
    """

    reads_over_nixl = True

    def __init__(self, pool: KvPool, host: HostPool, agents: NixlAgents, mapping: PeerPageCopies | None = None) -> None:
        """Read into pages of `pool` and `host`; `mapping` copies from memory that this process maps, if it can."""
        self._host = host
        self._agents = agents
        self._mapping = mapping
        tensors = [tensor for layer in pool.layers for tensor in layer.stored]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._device = Region.of(tensors[0])
        self._registered = agents.register([*tensors, host.memory])

    @property
    def slice_pages(self) -> int:
        return max(1, min(self._host.pages, SLICE_BYTES // self._host.page_bytes))

    @property
    def direct_slice_pages(self) -> int:
        return self.slice_pages if self._mapping is None else self._mapping.direct_slice_pages

    def can_write(self, host_pages: PageIds) -> bool:
        return self._mapping is None or self._mapping.can_write(host_pages)

    def map(self, memory: SharedPages) -> MappedPages:
        if not memory.over_nixl:
            if self._mapping is None:
                raise SharingError("memory of a GPU cannot be mapped here")
            return self._mapping.map(memory)
        _, layers, halves, elements = self._host.memory.shape
        page_bytes = elements * self._host.memory.itemsize
        if (len(memory.tensors), memory.tensor_page_bytes) != (layers * halves, page_bytes):
            raise SharingError("its pages have another form")
        return MappedPages(memory, self._agents)

    def copy(self, source: MappedPages, pages: PageIds, host_pages: PageIds) -> None:
        if not source.memory.over_nixl and self._mapping is not None:
            self._mapping.copy(source, pages, host_pages)
            return
        # Of one host page, the tensors' parts lie one after the other.
        size = source.memory.tensor_page_bytes
        parts = np.arange(len(source.addresses), dtype=np.uint64) * np.uint64(size)
        begins = np.uint64(self._host.memory.data_ptr()) + _ids(host_pages) * np.uint64(self._host.page_bytes)
        ones = np.ones(len(pages), np.uint64)
        self._read(source, pages, ones, MemoryPieces(_pieces(parts, begins, ones, size)))

    def copy_to_device(self, source: MappedPages, pages: PageIds, device_pages: PageIds) -> None:
        if not source.memory.over_nixl and self._mapping is not None:
            self._mapping.copy_to_device(source, pages, device_pages)
            return
        # Pages that lie one after the other on both sides are one piece of each tensor.
        is_first = (np.diff(pages, prepend=-2) != 1) | (np.diff(device_pages, prepend=-2) != 1)
        starts = np.flatnonzero(is_first)
        lengths = np.diff(starts, append=len(pages)).astype(np.uint64)
        size = source.memory.tensor_page_bytes
        begins = _ids(device_pages[starts]) * np.uint64(size)
        rows = _pieces(np.array(self._addresses, np.uint64), begins, lengths, size)
        self._read(source, pages[starts], lengths, MemoryPieces(rows, self._device.is_gpu, self._device.device_index))

    def close(self) -> None:
        """Take this rank's memory back; no copy may be under way."""
        self._agents.unregister(self._registered)

    def _read(self, source: MappedPages, firsts: PageIds, lengths: NDArray[np.uint64], into: MemoryPieces) -> None:
        """Read runs of pages that begin with `firsts`, [runs] int32, and have `lengths`, [runs] pages."""
        if not len(firsts):
            return
        if firsts.min() < 0 or int((firsts + lengths.astype(np.int64)).max()) > source.memory.pages:
            raise SharingError("there are no such pages")
        addresses = np.array([address & _ADDRESS for address in source.addresses], np.uint64)
        size = source.memory.tensor_page_bytes
        rows = _pieces(addresses, _ids(firsts) * np.uint64(size), lengths, size)
        self._agents.read(source.addresses[0] >> ADDRESS_BITS << ADDRESS_BITS, into, MemoryPieces(rows))


def _ids(pages: PageIds) -> NDArray[np.uint64]:
    return pages.astype(np.uint64)


def _pieces(
    tensors: NDArray[np.uint64], begins: NDArray[np.uint64], lengths: NDArray[np.uint64], size: int
) -> NDArray[np.uint64]:
    """Return address and bytes of each run in each tensor, [runs * tensors, 2]; pages have `size` bytes there."""
    addresses = begins[:, None] + tensors[None, :]
    sizes = np.broadcast_to((lengths * np.uint64(size))[:, None], addresses.shape)
    return np.stack([addresses.ravel(), sizes.ravel()], axis=1)
