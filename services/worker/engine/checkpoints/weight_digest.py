"""A digest of weights, computed beside their loading."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    Block = torch.Tensor | NDArray[np.uint8]

# A core hashes 1.5 to 2 GB/s, with the SHA instructions that processors have had since 2017 or so.
_THREADS = min(4, os.cpu_count() or 1)
# Blocks that wait for their turn are kept in memory; the reader waits beyond that.
_PENDING_BYTES = 1 << 30


class WeightDigest:
    """SHA-256 of every block that is read of a checkpoint, by name, type and shape, in whichever order.

    Blocks are hashed as they were read, in threads: nothing is read twice. No caller may change a block
    afterwards.
    """

    def __init__(self) -> None:
        """Start with no block; threads start with the first."""
        self._threads = ThreadPoolExecutor(_THREADS, "weight-digest")
        self._blocks: dict[str, Future[bytes]] = {}
        self._pending = 0
        self._has_room = threading.Condition()

    def add(self, name: str, block: Block) -> None:
        """Hash a block called `name`; a block of the same name counts once."""
        if name in self._blocks:
            return
        with self._has_room:
            self._has_room.wait_for(lambda: not self._pending or self._pending + block.nbytes <= _PENDING_BYTES)
            self._pending += block.nbytes
        self._blocks[name] = self._threads.submit(self._hash, block)

    def note(self, name: str, text: str) -> None:
        """Let the digest depend on something else than a block, such as a configuration."""
        self.add(name, np.frombuffer(text.encode(), np.uint8))

    def hexdigest(self) -> str:
        """Return the digest of all blocks so far, once they have been hashed."""
        digests = sorted((name, block.result()) for name, block in self._blocks.items())
        return hashlib.sha256(
            b"".join(hashlib.sha256(name.encode()).digest() + digest for name, digest in digests)
        ).hexdigest()

    def _hash(self, block: Block) -> bytes:
        size = block.nbytes
        try:
            kind = f"{block.dtype} {tuple(block.shape)} ".encode()
            hasher = hashlib.sha256(hashlib.sha256(kind).digest())
            if isinstance(block, torch.Tensor):
                # As bytes; NumPy has no bfloat16.
                block = block.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            hasher.update(block.data)
            return hasher.digest()
        finally:
            with self._has_room:
                self._pending -= size
                self._has_room.notify()


def block_name(name: str, rows: slice | None, columns: slice | None) -> str:
    """Return a name for some rows and columns of a tensor."""
    parts = [name, *("" if part is None else f"{part.start}:{part.stop}" for part in (rows, columns))]
    return " ".join(parts)
