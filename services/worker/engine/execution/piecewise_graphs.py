"""Passes with few prompt tokens, captured in pieces: launching hundreds of programs takes longer than computing them.

Attention of chunks is planned on the host for the very rows of a pass, so it cannot be part of a graph. A pass runs as
a graph up to the first layer's attention, that attention, a graph up to the next one, and so on. What a graph and an
attention hand to each other lies at addresses that the capture has fixed; tokens beyond those of the pass are padding.

Where the model sees images, their embeddings take their places between graphs, too: a pass has as many as it happens to
have. Positions on several axes are an input of the graphs; those of texts are the same on each axis.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from services.worker.engine.execution.cuda_graphs import CudaGraphs, has_memory
from services.worker.engine.execution.stage_ends import NoEnds
from services.worker.engine.model.batch import ForwardBatch
from services.worker.engine.vision.axes import AXES

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.execution.decode_graphs import OverlappedModel
    from services.worker.engine.execution.device_batch import DeviceBatch
    from services.worker.engine.execution.stage_ends import StageEnds
    from services.worker.engine.model.batch import Attend, Deferral

# The unit of capture sizes, for the log.
UNIT = "prompt tokens"
MOST_TOKENS = 4096


def piecewise_capture_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture, up to `most`: few are padding, and at most a fifth of larger numbers."""
    sizes = [16, 32, 48, *range(64, 257, 32)]
    for first in (256, 512, 1024, 2048):
        sizes += range(first + first // 4, 2 * first + 1, first // 4)
    return tuple(size for size in sizes if size <= min(most, MOST_TOKENS))


def largest_worthwhile_size(
    max_step_tokens: int, make: Callable[[int], PiecewiseGraph], pool: Any, agree: Callable[[bool], bool] | None
) -> int:
    """Return for how many tokens it takes longer to launch the programs than to compute them, about.

    Measured once, as it depends on the model as much as on both processors; ranks come to the same answer by `agree`,
    as `OverlappedModel` has it.
    """
    most = min(256, max_step_tokens)
    for size in (512, 1024, 2048, MOST_TOKENS):
        if size > max_step_tokens:
            break
        # Captured as it will be later: lack of memory ends the search, and other errors are raised.
        alone = CudaGraphs((size,), make, UNIT)
        alone.capture(lambda _share: None, math.inf, pool, agree)
        one = alone.captured(size)
        if one is None:
            break
        saves = one.saves_time()
        one.release()
        if not (saves if agree is None else agree(saves)):
            break
        most = size
    return most


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Attention or another call between graphs. Neither tensor owns its memory, which other passes use meanwhile."""

    attend: Attend
    queries: torch.Tensor
    outputs: torch.Tensor
    in_window: bool

    def run(self, kinds: tuple[ForwardBatch, ForwardBatch]) -> None:
        """Attend for the tokens of a batch, given as all layers and as those with a window take it."""
        batch = kinds[self.in_window]
        tokens = batch.token_ids.shape[0]
        self.attend(self.queries[:tokens], self.outputs[:tokens], batch)


@dataclass(frozen=True, slots=True)
class _LaterImages:
    """Images of passes that are not known yet when graphs are captured; see `BatchImages`."""

    deep_layers: int
    defer: Deferral

    def place(self, hidden: torch.Tensor) -> None:
        self.defer(_place, hidden, hidden, in_window=False)

    def deepen(self, hidden: torch.Tensor, layer: int) -> None:
        self.defer(partial(_deepen, layer), hidden, hidden, in_window=False)


def _do_nothing() -> None:
    """Do nothing."""


def _place(_tokens: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> None:
    if batch.images is not None:
        batch.images.place(hidden)


def _deepen(layer: int, _tokens: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> None:
    if batch.images is not None:
        batch.images.deepen(hidden, layer)


class PiecewiseGraph:
    """A pass of up to `size` tokens, of rows that decode and chunks of prompts."""

    def __init__(
        self, size: int, rows: DeviceBatch, runner: OverlappedModel, ends: StageEnds | NoEnds | None = None
    ) -> None:
        """Allocate its input, but what enters at `ends`; None: the model is whole."""
        device, capacity = rows.cells.device, runner.capacity
        self.size = size
        self._runner = runner
        self._ends = ends or NoEnds()
        window, vision = capacity.window_pool, runner.vision_config
        # KV of padding is written to the page after the last one of each pool.
        self._padding_slot = capacity.device_pages * capacity.page_size
        self._window_padding_slot = window.pages * capacity.page_size if window else 0
        self._batch = ForwardBatch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            query_starts=torch.tensor([0, size], dtype=torch.int32, device=device),
            key_lengths=torch.full((1,), size, dtype=torch.int32, device=device),
            page_table=rows.page_table[:1],
            write_slots=torch.full((size,), self._padding_slot, device=device),
            sample_indices=torch.arange(size, device=device),
            decode_rows=0,
            max_query_length=size,
            max_key_length=size,
            window_table=None if rows.window_table is None else rows.window_table[:1],
            window_slots=torch.full((size,), self._window_padding_slot, device=device) if window else None,
            defer=self._defer,
            images=None if vision is None else _LaterImages(len(vision.deep_layers), self._defer),
            coordinates=torch.zeros(AXES, size, dtype=torch.int64, device=device) if vision and vision.axes else None,
            stage=self._ends.buffers(size),
        )
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._deferred: list[_Deferred] = []
        self._is_recording = False
        self._kinds: tuple[ForwardBatch, ForwardBatch] | None = None
        self._hidden = torch.empty(0, device=device)

    def hidden_states(self, batch: ForwardBatch, between: Callable[[], None] = _do_nothing) -> torch.Tensor:
        """Run `batch`, which has at most `size` tokens; see `OverlappedModel.hidden_states`.

        `between` is called after each graph that is launched but the last.
        """
        tokens = batch.token_ids.shape[0]
        self._take(batch)
        self._ends.receive(tokens)
        kinds = (batch, batch.in_window())
        if self._graphs:
            *graphs, last = self._graphs
            for graph, deferred in zip(graphs, self._deferred, strict=True):
                graph.replay()
                deferred.run(kinds)
                between()
            last.replay()
        else:
            self._kinds = kinds
            self._hidden = self._runner.hidden_states(self._batch)
            self._kinds = None
        self._ends.send(tokens)
        # A stage that is not the last one returns none.
        return self._hidden[batch.sample_indices] if len(self._hidden) else self._hidden

    def saves_time(self) -> bool:
        """Whether the host launches the model's programs, but attention, for longer than the device computes them.

        To be asked of a pass that was captured.
        """
        started = time.perf_counter()
        self._runner.hidden_states(self._batch)
        launched_ms = 1e3 * (time.perf_counter() - started)
        torch.cuda.synchronize()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        for graph in self._graphs:
            graph.replay()
        ended.record()
        ended.synchronize()
        return launched_ms > float(begun.elapsed_time(ended))

    def has_memory(self) -> bool:
        """Run the model without its attention; see `CudaGraph.has_memory`."""
        return has_memory(lambda: self._runner.hidden_states(self._batch), self._batch.token_ids.device)

    def capture(self, pool: Any) -> None:  # torch does not export the type
        """Record the pieces, with memory from `pool`, after a run that compiles and warms up."""
        self._runner.hidden_states(self._batch)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._graphs, self._deferred, self._pool = [], [], pool
        with torch.cuda.stream(stream):
            self._is_recording = True
            self._begin()
            try:
                hidden = self._runner.hidden_states(self._batch)
            finally:
                self._is_recording = False
                self._graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._hidden = _unowned(hidden) if len(hidden) else hidden

    def release(self) -> None:
        """Drop the captured graphs."""
        self._graphs, self._deferred = [], []
        self._hidden = torch.empty(0, device=self._hidden.device)

    def _take(self, batch: ForwardBatch) -> None:
        own, tokens = self._batch, batch.token_ids.shape[0]
        own.token_ids[:tokens].copy_(batch.token_ids)
        own.positions[:tokens].copy_(batch.positions)
        if own.coordinates is not None:
            # Positions are the same on each axis.
            own.coordinates[:, :tokens].copy_(batch.positions if batch.coordinates is None else batch.coordinates)
        own.write_slots[:tokens].copy_(batch.write_slots)
        # Padding computes stale input, but must not write to its slots.
        own.write_slots[tokens:].fill_(self._padding_slot)
        if own.window_slots is not None and batch.window_slots is not None:
            own.window_slots[:tokens].copy_(batch.window_slots)
            own.window_slots[tokens:].fill_(self._window_padding_slot)

    def _defer(self, attend: Attend, queries: torch.Tensor, outputs: torch.Tensor, *, in_window: bool) -> None:
        if self._is_recording:
            self._graphs[-1].capture_end()
            self._deferred.append(_Deferred(attend, _unowned(queries), _unowned(outputs), in_window))
            self._begin()
        elif self._kinds is not None:
            _Deferred(attend, queries, outputs, in_window).run(self._kinds)

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads, such as NCCL's watchdog, may query the device during capture.
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")


class _Address:
    """Memory of a tensor, for those that read `__cuda_array_interface__`, which has no name for bfloat16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` without a hold on its memory, which the graphs of one pool share."""
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)
