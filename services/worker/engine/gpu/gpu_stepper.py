"""Computes passes on a GPU over resident rows, without waiting for any of them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.gpu.chunk_halves import halves
from services.worker.engine.gpu.decode_passes import DecodePass, DecodePasses, ResidentRunner, ladder
from services.worker.engine.gpu.resident_rows import ResidentRows, to_device
from services.worker.engine.kernels.gpu import row_state
from services.worker.engine.kernels.gpu.sampling import TokenChooser
from services.worker.engine.plans.passes import NO_CHUNKS, ForwardPass, gather
from services.worker.engine.plans.plan_runner import Sampled
from services.worker.engine.sampling.sampler import Samples, sample
from services.worker.engine.sampling.table import Needs, SamplingTable
from services.worker.engine.torch_engine import to_device as batch_to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import EngineSpec, StepPlan
    from common.types import RowSlot, TokenLogprob
    from services.worker.engine.plans.rows import RowIndices, RowTable

log = logging.getLogger(__name__)

_ON_DEVICE = Needs.DRAW | Needs.ORDER | Needs.MIN_P
_FILTERS = Needs.ORDER | Needs.MIN_P
# Start-up may spend this long on graphs.
_CAPTURE_BUDGET_S = 45.0


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """Tokens on their way to the host; `order[i]` is where the i-th sampled row's token lies."""

    token_ids: torch.Tensor
    order: RowIndices
    event: torch.cuda.Event | None
    logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()

    def is_ready(self) -> bool:
        """Whether they have arrived."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def wait(self) -> Sampled:
        """Return them."""
        if self.event is not None:
            self.event.synchronize()
        return Sampled(self.token_ids.numpy()[self.order], self.logprobs)


class GpuStepper:
    """Decoding rows run from captured graphs; passes with chunks are launched kernel by kernel."""

    def __init__(self, runner: ResidentRunner, spec: EngineSpec) -> None:
        """Use `runner`, with rows as `spec` says."""
        capacity, device = runner.capacity, runner.device
        self._runner = runner
        self._is_first = spec.rank == 0
        self._is_shared = spec.world_size > 1
        self._table = SamplingTable(spec.max_rows, capacity.vocabulary_size)
        self._rows = ResidentRows(
            spec.max_rows,
            -(-capacity.max_context // capacity.page_size),
            padding_page=capacity.device_pages,
            vocabulary_size=capacity.vocabulary_size,
            device=device,
        )
        self._chooser = TokenChooser(spec.max_rows, capacity.vocabulary_size, device)

        def make(size: int) -> DecodePass:
            return DecodePass(size, self._rows, runner, self._chooser, chooses=self._is_first)

        self._decode_passes = DecodePasses(ladder(spec.max_rows), make)

    def capture(self, report: Callable[[float], None]) -> None:
        """Capture decode passes as graphs."""
        # Ranks must capture the same passes, since these meet in collectives.
        self._decode_passes.capture(report, math.inf if self._is_shared else _CAPTURE_BUDGET_S)

    def mirror(self, plan: StepPlan, rows: RowTable) -> None:
        """Take note of what a plan has changed; see `LaggedStepper`."""
        for opened in plan.opens:
            self._table.open(opened)
        self._rows.mirror(plan, rows)

    def needs_history(self, rows: RowTable, forward: ForwardPass) -> bool:
        """Whether the sampler has to look at the rows' earlier tokens on the host."""
        return self._needs_host(rows, forward.sampled_rows)

    def launch(self, rows: RowTable, forward: ForwardPass) -> LaunchedTokens:
        """Start a pass; see `LaggedStepper`."""
        self._rows.upload()
        if forward.chunks.rows.size:
            return self._launch_mixed(rows, forward)
        members = forward.decode_rows
        one = self._decode_passes.of(members.size)
        order = one.take(members, rows.lengths[members])
        one.compute()
        if self._needs_host(rows, members):
            at = torch.from_numpy(order).to(self._runner.device)
            samples = self._sample_on_host(one.logits, at, members, rows)
            padded = torch.zeros(one.size, dtype=torch.int32, device=self._runner.device)
            padded[at] = samples.token_ids.to(torch.int32)
            one.tell(padded)
            return self._fetch(one.token_ids, order, samples.logprobs)
        one.choose(filtered=bool(self._table.needs_of(members) & _FILTERS))
        return self._fetch(one.token_ids, order)

    def _launch_mixed(self, rows: RowTable, forward: ForwardPass) -> LaunchedTokens:
        logits = self._compute_smaller(rows, forward)
        sampled = forward.sampled_rows
        order = np.arange(sampled.size)
        if sampled.size == 0:
            return LaunchedTokens(torch.empty(0, dtype=torch.int32), order, None)
        device = self._runner.device
        slots = to_device(sampled.astype(np.int32), device)
        token_ids = torch.empty(sampled.size, dtype=torch.int32, device=device)
        logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()
        if self._needs_host(rows, sampled):
            samples = self._sample_on_host(logits, torch.from_numpy(order).to(device), sampled, rows)
            token_ids.copy_(samples.token_ids)
            logprobs = samples.logprobs
        else:
            if self._is_first:
                filtered = bool(self._table.needs_of(sampled) & _FILTERS)
                self._chooser.choose(logits, slots, self._rows.cells, token_ids, filtered=filtered)
            self._runner.broadcast_tokens(token_ids)
        row_state.append(self._rows.cells, slots, token_ids)
        return self._fetch(token_ids, order, logprobs)

    def _compute_smaller(self, rows: RowTable, forward: ForwardPass) -> torch.Tensor:
        """Compute a pass with chunks; where memory does not suffice, in halves."""
        try:
            return self._compute_mixed(rows, forward)
        except torch.OutOfMemoryError:
            # Ranks must make the same passes, and the others may have had the memory.
            if self._is_shared or forward.chunks.lengths.sum() <= 1:
                raise
        torch.cuda.empty_cache()
        first, second = halves(forward.chunks)
        log.warning("Out of memory in a pass of %d tokens: it is computed in two", forward.chunks.lengths.sum())
        parts = (ForwardPass(forward.decode_rows, first), ForwardPass(NO_CHUNKS.rows, second))
        return torch.cat([self._compute_smaller(rows, part) for part in parts])

    def _compute_mixed(self, rows: RowTable, forward: ForwardPass) -> torch.Tensor:
        host = gather(rows, forward)
        batch = replace(batch_to_device(host, self._runner.device), host=host)
        decoding = forward.decode_rows
        if decoding.size:
            # The host may not know yet what these rows sampled last.
            slots = to_device(decoding.astype(np.int32), self._runner.device)
            batch.token_ids[: decoding.size] = self._rows.last_tokens[slots.long()].long()
        return self._runner.compute(batch)

    def _needs_host(self, rows: RowTable, slots: RowIndices) -> bool:
        if slots.size == 0:
            return False
        needs = self._table.needs_of(slots) & ~_ON_DEVICE
        if needs == Needs.MIN_TOKENS:
            masked = slots[self._table.rows_that_need(Needs.MIN_TOKENS, slots)]
            return bool((rows.lengths[masked] < rows.stops_from[masked]).any())
        return needs != Needs.NOTHING

    def _sample_on_host(self, logits: torch.Tensor, places: torch.Tensor, slots: RowIndices, rows: RowTable) -> Samples:
        """Choose with the sampler that knows every parameter, and waits."""
        if self._is_first:
            samples = sample(logits[places].float(), slots, rows, self._table)
        else:
            samples = Samples(torch.empty(slots.size, dtype=torch.int64, device=self._runner.device))
        return Samples(self._runner.broadcast_tokens(samples.token_ids), samples.logprobs)

    def _fetch(
        self, token_ids: torch.Tensor, order: RowIndices, logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()
    ) -> LaunchedTokens:
        if self._runner.device.type == "cpu":
            return LaunchedTokens(token_ids.clone(), order, None, logprobs)
        host = torch.empty(token_ids.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(token_ids, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return LaunchedTokens(host, order, event, logprobs)
