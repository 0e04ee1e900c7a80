"""Memory of KV pages that workers of other groups map, or read over NIXL, to read pages without sending them."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Readers copy slices of so many bytes, so many of them at the same time: enough that the bus does not wait while one is
# confirmed, and few enough that ending a lease waits for a few milliseconds.
SLICE_BYTES = 32 * 1024**2
SLICES_AT_ONCE = 3
# The same for copies to the reader's own device, which are many times as fast.
DIRECT_SLICE_BYTES = 256 * 1024**2
# How long memory is kept for readers that are asked to unmap it: far more than it takes.
RECALL_S = 2.0


class SharingError(Exception):
    """Memory cannot be shared with another process, or not be mapped here."""


class BrokenReadError(SharingError):
    """Memory of another process could not be read, though it was mapped."""


@dataclass(frozen=True, slots=True)
class SharedPages:
    """The tensors of a KV pool, layer by layer and keys first, as other processes find them; see protos/worker.proto.

    `allocations` are handles. `tensors` has for each tensor the index of its allocation and its first byte there; a
    page has `tensor_page_bytes` bytes in each. `name`, 16 random bytes, changes with the memory.

    If `over_nixl`, there is one handle, of a NIXL agent, and tensors' first bytes are addresses.
    """

    name: bytes
    pages: int
    tensor_page_bytes: int
    allocations: tuple[bytes, ...]
    tensors: tuple[tuple[int, int], ...]
    over_nixl: bool = False


class MemoryAccess(Protocol):
    """Memory of other processes for this one; see `CudaSharing` and `NixlAgents`."""

    def open(self, handle: bytes) -> int:
        """Map an allocation; return its address."""

    def close(self, address: int) -> None:
        """Unmap it."""


class MemorySharing(MemoryAccess, Protocol):
    """Memory of this process for others, too; see `CudaSharing`."""

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation at an address, and the address's offset there."""


def share_pages(
    name: bytes, addresses: Iterable[int], pages: int, tensor_page_bytes: int, sharing: MemorySharing
) -> SharedPages:
    """Export the memory of tensors at `addresses`, of `pages` pages each.

    Raises:
        SharingError: it cannot be shared.
    """
    handles: list[bytes] = []
    indices: dict[int, int] = {}
    tensors = []
    for address in addresses:
        handle, offset = sharing.export(address)
        begin = address - offset
        if begin not in indices:
            indices[begin] = len(handles)
            handles.append(handle)
        tensors.append((indices[begin], offset))
    return SharedPages(name, pages, tensor_page_bytes, tuple(handles), tuple(tensors))


class MappedPages:
    """Memory of another process that this one has mapped, or can read over NIXL."""

    def __init__(self, memory: SharedPages, sharing: MemoryAccess) -> None:
        """Map `memory`.

        Raises:
            SharingError: it cannot be mapped.
        """
        self.memory = memory
        self._sharing = sharing
        self._allocations: list[int] = []
        try:
            for handle in memory.allocations:
                self._allocations.append(sharing.open(handle))
        except SharingError:
            self.close()
            raise
        # Of the tensors.
        self.addresses = tuple(self._allocations[allocation] + offset for allocation, offset in memory.tensors)

    def close(self) -> None:
        """Unmap it; no copy may be under way."""
        for address in self._allocations:
            # The other process may have ended.
            with contextlib.suppress(SharingError):
                self._sharing.close(address)
        self._allocations.clear()


class Borrowers:
    """The readers that have mapped this process's memory, or may have. Methods belong to no thread."""

    def __init__(self, recall_s: float = RECALL_S) -> None:
        """Wait `recall_s` seconds for them to unmap it."""
        self._recall_s = recall_s
        self._recalls: set[Callable[[], None]] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, recall: Callable[[], None]) -> bool:
        """Count a reader, which `recall` asks to unmap the memory; return false if it is about to be freed."""
        with self._changed:
            if not self._is_closed:
                self._recalls.add(recall)
            return not self._is_closed

    def remove(self, recall: Callable[[], None]) -> None:
        """Forget a reader, which has unmapped the memory or ended."""
        with self._changed:
            self._recalls.discard(recall)
            self._changed.notify_all()

    def close(self) -> bool:
        """Ask all readers to unmap the memory; return whether all have, in time."""
        with self._changed:
            self._is_closed = True
            for recall in self._recalls:
                recall()
            return self._changed.wait_for(lambda: not self._recalls, self._recall_s)
