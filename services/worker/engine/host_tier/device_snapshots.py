"""Reading and writing snapshots of recurrent states as bytes, to and from workers of other groups."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.host_tier.page_form import PageForm

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from services.worker.engine.model.recurrent import StatePool
    from services.worker.engine.parallel.shards import Span


def snapshot_form(states: StatePool, key_heads: Span, total_heads: int) -> PageForm:
    """Return where this rank's key heads lie in a snapshot: matrices of all layers, then inputs of all layers.

    To each key head belong its value heads. A layer's inputs have, for each token, queries, keys and values of all
    heads, one after the other.
    """
    layers, _, value_heads, key_dim, value_dim = states.matrices.shape
    tokens, size = states.inputs.shape[2], states.inputs.itemsize
    each = value_heads // len(key_heads)
    of_token = ((2, key_dim * size), (1, each * value_dim * size))
    matrix = each * key_dim * value_dim * states.matrices.itemsize
    return PageForm(((layers, matrix), *of_token * (layers * tokens)), key_heads, total_heads)


class DeviceSnapshots:
    """Snapshots of a rank's recurrent states; see `SnapshotBytes`.

    On a GPU, they are copied on a stream of their own, beside the passes.
    """

    def __init__(self, states: StatePool, form: PageForm) -> None:
        """Read and write snapshots of `states`, which are of this form."""
        self.form = form
        self._states: StatePool | None = states
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None

    @torch.inference_mode()
    def read(self, snapshot: int, heads: Span) -> bytes:
        with self._lock:
            if self._states is None:
                return b""
            with self._beside_passes(self._states):
                parts = [part.contiguous().cpu().flatten() for part in _parts(self._states, snapshot)]
        return self.form.cut(b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts), heads)

    @torch.inference_mode()
    def write(self, snapshot: int, content: memoryview) -> None:
        # A copy: torch takes no memory that is read-only.
        held = torch.from_numpy(np.array(content))
        with self._lock:
            if self._states is None:
                return
            with self._beside_passes(self._states):
                end = 0
                for part in _parts(self._states, snapshot):
                    start, end = end, end + part.numel() * part.itemsize
                    part.copy_(held[start:end].view(part.dtype).view(part.shape))
            if self._stream is not None:
                self._stream.synchronize()

    def close(self) -> None:
        """Let go of the states, once what is under way has ended."""
        with self._lock:
            self._states = None

    def _beside_passes(self, states: StatePool) -> AbstractContextManager[object]:
        if not states.matrices.is_cuda:
            return contextlib.nullcontext()
        if self._stream is None:
            # torch has no types for it
            self._stream = torch.cuda.Stream(states.matrices.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def _parts(states: StatePool, snapshot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices and the inputs of a snapshot, of all layers."""
    place = states.place_of(snapshot)
    return states.matrices[:, place], states.inputs[:, place]
