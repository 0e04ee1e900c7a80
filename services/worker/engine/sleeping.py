"""The memory of a model that sleeps: weights that move to the host and back, and what is returned to the system."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import psutil
import torch

from services.worker.engine.host_memory import return_freed_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Packages whose objects may hold weights; others, such as modules and locks, are not searched.
_SEARCHED = ("services.worker.engine", "transformers", "torch.nn")


class HostBuffers:
    """Page-locked memory for copies of a model's tensors, which may be kept for the next ones.

    Locking takes longer than copying. What is kept is in use all the time: what torch only caches is returned to the
    system whenever CUDA graphs are captured.
    """

    def __init__(self, *, keeps: bool) -> None:
        """Start without any; `keeps` whether memory is kept that is not used."""
        self.keeps = keeps
        self._unused: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """Return [size] uint8: kept memory of exactly so many bytes, or new memory."""
        kept = self._unused.get(size)
        return kept.pop() if kept else _lock(size)

    def put_back(self, buffer: torch.Tensor) -> None:
        """Take over memory that was taken, and is not used any more."""
        if self.keeps:
            self._unused.setdefault(len(buffer), []).append(buffer)

    def clear(self) -> None:
        """Keep nothing any longer."""
        self._unused.clear()


class ParkedTensors:
    """The tensors of a model on a GPU, whose memory is given back while copies of them lie in page-locked host memory.

    The tensors themselves remain, and so does what refers to them; only their addresses change, so that CUDA graphs
    have to be captured again.
    """

    def __init__(self, model: object, buffers: HostBuffers) -> None:
        """Move all tensors that `model` holds on a GPU to `buffers` on the host. No kernel may be running."""
        self._buffers = buffers
        self._parked: list[tuple[torch.UntypedStorage, int, torch.Tensor]] = []
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors_of(model):
            if not tensor.is_cuda:
                continue
            storage = tensor.untyped_storage()
            # Memory of other owners, as that shared by GPUs, cannot be given back.
            if storage.resizable() and storage.nbytes():
                storages.setdefault(storage.data_ptr(), storage)
        try:
            for storage in storages.values():
                host = buffers.take(storage.nbytes())
                self._parked.append((storage, len(host), host))
                host.copy_(_bytes_of(storage), non_blocking=True)
            if storages:
                torch.cuda.synchronize()
        except BaseException:
            # The tensors are whole, and the memory that was locked is not lost.
            for _, _, host in self._parked:
                buffers.put_back(host)
            raise
        for storage, _, _ in self._parked:
            storage.resize_(0)

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(size for _, size, _ in self._parked)

    def restore(self) -> None:
        """Move all tensors back.

        Raises:
            torch.OutOfMemoryError: the device has no room for them.
        """
        for storage, size, host in self._parked:
            storage.resize_(size)
            _bytes_of(storage).copy_(host, non_blocking=True)
        if not self._parked:
            return
        torch.cuda.synchronize()
        for _, _, host in self._parked:
            self._buffers.put_back(host)
        self._parked.clear()
        release_host_memory()


def _lock(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_of(root: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object of the engine holds, by attributes and collections, each at least once."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, torch.Tensor):
            yield at
        elif isinstance(at, dict):
            waiting.extend(at.values())
        elif isinstance(at, (list, tuple, set, frozenset)):
            waiting.extend(at)
        elif type(at).__module__.startswith(_SEARCHED):
            waiting.extend(_attributes(at))


def _attributes(at: object) -> Iterator[object]:
    attributes: Mapping[str, object] = getattr(at, "__dict__", {})
    yield from attributes.values()
    for kind in type(at).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(at, name):
                yield getattr(at, name)


def release_host_memory() -> None:
    """Return page-locked memory that no tensor uses to the system, which torch would keep for others."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # torch 2.11 has no public name for it.
        torch._C._host_emptyCache()


def release_memory(device: torch.device) -> None:
    """Return freed memory to the device, or to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        release_host_memory()
    else:
        return_freed_memory()


def used_memory(device: torch.device) -> int:
    """Return the bytes in use on a GPU, or by this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return int(psutil.Process().memory_info().rss)
