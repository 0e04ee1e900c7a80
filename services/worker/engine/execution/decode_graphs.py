"""CUDA graphs of decode passes at capture sizes: one launch instead of hundreds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from services.worker.engine.execution.cuda_graphs import has_memory
from services.worker.engine.execution.device_sampler import SamplingMode
from services.worker.engine.kernels.gpu import device_batch as row_state
from services.worker.engine.kernels.gpu.logprobs import LogprobBuffers
from services.worker.engine.model.batch import ForwardBatch, StateSlots
from services.worker.engine.plans.rows import NO_ADAPTER
from services.worker.engine.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from common.steps import EngineCapacity
    from services.worker.engine.execution.device_batch import DeviceBatch
    from services.worker.engine.execution.device_sampler import DeviceSampler
    from services.worker.engine.execution.stage_ends import NoEnds, StageEnds
    from services.worker.engine.plans.rows import RowIndices
    from services.worker.engine.vision.config import VisionConfig


class OverlappedModel(Protocol):
    """One rank's model on a GPU, as `ModelRunner` implements it.

    Its KV pool has one more page than `capacity` says, for padding.
    """

    capacity: EngineCapacity
    device: torch.device

    @property
    def vision_config(self) -> VisionConfig | None:
        """How the model takes images; None: it sees none."""

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits of the batch's samples, [samples, vocabulary] in the model's type, without waiting."""

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a pass, but return the final hidden states of the samples, [samples, hidden]."""

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of hidden states [samples, hidden], as `compute` does."""

    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `token_ids` on every rank."""

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on every rank; all ask at the same time, and wait."""


def decode_capture_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: dense where a step is short, within an eighth of any size above 64."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, 257, 32), *range(320, 4097, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


class DecodeGraph:
    """Everything a pass of `size` rows reads and writes, at fixed addresses."""

    def __init__(
        self, size: int, rows: DeviceBatch, runner: OverlappedModel, sampler: DeviceSampler | None,
        ends: StageEnds | NoEnds, *, has_adapters: bool,
    ) -> None:  # fmt: skip
        """Allocate; ranks whose `sampler` does not sample receive the tokens by `runner.broadcast_tokens`.

        Without `sampler`, a later stage samples, and nothing is chosen here. With `has_adapters`, passes are captured
        with the products of adapters and without them.
        """
        device = rows.cells.device
        self.size = size
        self.slots = torch.full((size,), rows.padding_slot, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.logits = torch.empty(0, device=device)
        # Filled in passes in which any row requests log probabilities.
        self.report = LogprobBuffers.empty(size, runner.capacity.vocabulary_size, device)
        self._rows = rows
        self._page_size = runner.capacity.page_size
        self._runner = runner
        self._sampler = sampler
        self._ends = ends
        self._batch = ForwardBatch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            key_lengths=torch.ones(size, dtype=torch.int32, device=device),
            page_table=rows.page_table,
            write_slots=torch.zeros(size, dtype=torch.int64, device=device),
            sample_indices=torch.arange(size, device=device),
            decode_rows=size,
            max_query_length=1,
            max_key_length=rows.page_table.shape[1] * self._page_size,
            table_rows=self.slots,
            window_table=rows.window_table,
            window_slots=None if rows.window_table is None else torch.zeros(size, dtype=torch.int64, device=device),
            # Padding rows have the slot after those of all rows.
            states=StateSlots(self.slots),
            stage=ends.buffers(size),
        )
        self._adapters = torch.full((size,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._adapted = replace(self._batch, adapters=self._adapters) if has_adapters else None
        self._is_adapted = False
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._members: RowIndices = np.empty(0, np.int64)
        self._order: RowIndices = np.empty(0, np.int64)
        self._member_adapters: NDArray[np.int32] = np.empty(0, np.int32)

    def take(self, members: RowIndices, lengths: RowIndices, adapters: NDArray[np.int32]) -> RowIndices:
        """Set the rows and the slots of their adapters; return the index of each row's token in `token_ids`."""
        if not np.array_equal(members, self._members):
            # Longest first: the programs that start last have the least work, so that multiprocessors end together.
            order = np.argsort(-lengths, kind="stable")
            slots = np.full(self.size, self._rows.padding_slot, np.int32)
            slots[: members.size] = members[order]
            self.slots.copy_(to_device(slots, self.slots.device), non_blocking=True)
            self._members, self._order = members.copy(), np.argsort(order, kind="stable")
            self._member_adapters = np.empty(0, np.int32)
        self._is_adapted = bool((adapters != NO_ADAPTER).any())
        # Members of the same rows may be other requests.
        if self._is_adapted and not np.array_equal(adapters, self._member_adapters):
            ordered = np.full(self.size, NO_ADAPTER, np.int32)
            ordered[self._order] = adapters
            self._adapters.copy_(to_device(ordered, self.slots.device), non_blocking=True)
            self._member_adapters = adapters.copy()
        return self._order

    def compute(self) -> None:
        """Run the model; stages receive their input before, and send their output afterwards."""
        self._ends.receive(self._members.size)
        if self._is_adapted:
            if not self._replay("compute adapted"):
                self._compute_adapted()
        elif not self._replay("compute"):
            self._compute()
        self._ends.send(self._members.size)

    def choose(self, mode: SamplingMode, *, with_logprobs: bool) -> None:
        """Sample, compute log probabilities if `with_logprobs`, and append the tokens to the rows."""
        if not self._replay(_name(mode, with_logprobs=with_logprobs)):
            self._choose(mode, with_logprobs=with_logprobs)

    def take_tokens(self, token_ids: torch.Tensor, *, counts: bool) -> None:
        """Append tokens that were sampled elsewhere, [size] int32; `counts` if any row has penalties."""
        assert self._sampler is not None, "earlier stages learn tokens on the host"
        self.token_ids.copy_(token_ids)
        self._sampler.append(self.slots, self.token_ids, counts=counts)

    def release(self) -> None:
        """Drop the captured graphs: the pass runs kernel by kernel."""
        self._graphs.clear()
        self.logits = torch.empty(0, device=self.logits.device)

    def has_memory(self) -> bool:
        """Run the model, and return whether as much as that took is still free for a graph, and something beside it."""
        return has_memory(self._compute, self.slots.device)

    def capture(self, pool: Any) -> None:  # torch does not export the type
        """Record the pass, with memory from `pool`, after a run that compiles and warms up."""
        for name, run in self._captured_runs():
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's watchdog, may query the device during capture.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                run()
            self._graphs[name] = graph

    def _captured_runs(self) -> list[tuple[str, Callable[[], None]]]:
        """Return the passes that become graphs of their own, in this order."""
        modes = () if self._sampler is None else tuple(SamplingMode)
        choices = [(mode, with_logprobs) for mode in modes for with_logprobs in (False, True)]
        runs: list[tuple[str, Callable[[], None]]] = [("compute", self._compute)]
        runs += [
            (_name(mode, with_logprobs=with_logprobs), partial(self._choose, mode, with_logprobs=with_logprobs))
            for mode, with_logprobs in choices
        ]
        if self._adapted is not None:
            runs.append(("compute adapted", self._compute_adapted))
        return runs

    def _replay(self, name: str) -> bool:
        graph = self._graphs.get(name)
        if graph is None:
            return False
        graph.replay()
        return True

    def _compute(self) -> None:
        self.logits = self._logits(self._batch)

    def _compute_adapted(self) -> None:
        assert self._adapted is not None, "only rows of models with slots have adapters"
        logits = self._logits(self._adapted)
        if self._graphs:
            # Graphs that choose tokens read them where they were first.
            self.logits.copy_(logits)
        else:
            self.logits = logits

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        row_state.prepare(
            self._rows.cells, self.slots, batch.token_ids, batch.positions, batch.key_lengths, batch.write_slots,
            self._page_size,
        )  # fmt: skip
        if batch.window_table is not None and batch.window_slots is not None:
            row_state.place(batch.window_table, self.slots, batch.key_lengths, batch.window_slots, self._page_size)
        return self._runner.compute(batch)

    def _choose(self, mode: SamplingMode, *, with_logprobs: bool) -> None:
        assert self._sampler is not None, "only the last stage chooses"
        if self._sampler.chooses:
            self._sampler.choose(self.logits, self.slots, self.token_ids, mode)
            if with_logprobs:
                self._sampler.report(self.logits, self.slots, self.token_ids, self.report)
        self._runner.broadcast_tokens(self.token_ids)
        # Last, since rows cannot be restored if a later operation fails.
        self._sampler.append(self.slots, self.token_ids, counts=mode is SamplingMode.PROCESSED)


def _name(mode: SamplingMode, *, with_logprobs: bool) -> str:
    return f"{mode.value}, reported" if with_logprobs else mode.value
