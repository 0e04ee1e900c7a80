"""Sampling for the device batch, in one of a few modes, each of which can be captured as a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.types import RowSlot, TokenLogprob
from services.worker.engine.execution.device_batch import to_device
from services.worker.engine.execution.device_logits_processors import (
    MOST_BIASES,
    PROCESSING,
    DeviceLogitsProcessors,
    bans_sequences,
)
from services.worker.engine.kernels.gpu import device_batch as row_state
from services.worker.engine.kernels.gpu.logprobs import MOST_NAMED, MOST_TOP, LogprobBuffers, report
from services.worker.engine.kernels.gpu.sampling import TokenChooser
from services.worker.engine.sampling.table import Needs

if TYPE_CHECKING:
    from common.steps import EngineSpec, RowOpen
    from services.worker.engine.execution.device_batch import DeviceBatch
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.sampling.table import SamplingTable

_FILTERS = Needs.ORDER | Needs.MIN_P


class SamplingMode(Enum):
    """How the rows of a pass choose; each does all that the one before does."""

    PLAIN = "plain"
    # With top-k, top-p or min-p.
    FILTERED = "filtered"
    # After logits processors.
    PROCESSED = "processed"


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Log probabilities that are being copied to the host: those of row `slots[i]` are in line `places[i]`."""

    report: LogprobBuffers
    slots: RowIndices
    places: RowIndices
    # The number of most likely tokens, and of requested ids, of each of `slots`.
    tops: tuple[int, ...]
    named: tuple[int, ...]

    def entries(self) -> tuple[tuple[RowSlot, TokenLogprob], ...]:
        """Return the log probabilities of each row, once the copy is complete."""
        values, ids = self.report.values.numpy(), self.report.top_ids.numpy()
        width = ids.shape[1]
        entries = []
        for slot, place, top, named in zip(self.slots, self.places, self.tops, self.named, strict=True):
            own, *likely = values[place, : 1 + top].tolist()
            asked = values[place, 1 + width : 1 + width + named].tolist()
            entry = TokenLogprob(own, tuple(ids[place, :top].tolist()), tuple(likely), tuple(asked))
            entries.append((RowSlot(int(slot)), entry))
        return tuple(entries)


class DeviceSampler:
    """Samples on the device. Ranks other than 0 take the same decisions, and append the tokens that rank 0 sampled."""

    def __init__(self, spec: EngineSpec, rows: DeviceBatch, table: SamplingTable) -> None:
        """Sample for `rows`, whose parameters are in `table`; all memory is allocated here."""
        device, vocabulary_size = rows.cells.device, table.vocabulary_size
        self._rows = rows
        self._table = table
        self._vocabulary_size = vocabulary_size
        self._is_beyond = np.zeros(spec.max_rows, np.bool_)
        self._bans_sequences = np.zeros(spec.max_rows, np.bool_)
        self._processors: DeviceLogitsProcessors | None = None
        if spec.rank != 0:
            return
        self._processors = DeviceLogitsProcessors(spec.max_rows, vocabulary_size, device)
        self._chooser = TokenChooser(spec.max_rows, vocabulary_size, device)
        # Ids whose log probabilities rows request; the last line is for padding rows.
        self._named = torch.zeros(spec.max_rows + 1, MOST_NAMED, dtype=torch.int64, device=device)

    @property
    def chooses(self) -> bool:
        return self._processors is not None

    def open(self, opened: RowOpen) -> None:
        """Prepare for a row, whose parameters are in the table already."""
        sampling = opened.sampling
        needs = Needs(int(self._table.needs[opened.row]))
        self._bans_sequences[opened.row] = bans_sequences(opened)
        self._is_beyond[opened.row] = (
            (sampling.top_logprobs or 0) > MOST_TOP
            or len(sampling.logprob_token_ids) > MOST_NAMED
            or len(sampling.logit_bias) > MOST_BIASES
        )
        if self._processors is None or self._is_beyond[opened.row]:
            return
        self._processors.open(opened, needs)
        if sampling.logprob_token_ids:
            named = np.zeros(MOST_NAMED, np.int64)
            named[: len(sampling.logprob_token_ids)] = sampling.logprob_token_ids
            self._named[int(opened.row)].copy_(to_device(named, self._named.device), non_blocking=True)

    def upload(self) -> None:
        """Send the queued changes."""
        self._rows.upload()
        if self._processors is not None:
            self._processors.upload()

    def can_choose(self, slots: RowIndices) -> bool:
        """Whether all of rows `slots` can be sampled here; else the host's sampler has to."""
        return not self._is_beyond[slots].any()

    def needs_history(self, slots: RowIndices) -> bool:
        """Whether the host needs all tokens of rows `slots`, to follow their grammars and banned sequences."""
        if slots.size == 0:
            return False
        follows = self._bans_sequences[slots].any() or bool(self._table.needs_of(slots) & Needs.GRAMMAR)
        return bool(follows) or not self.can_choose(slots)

    def mode_of(self, slots: RowIndices, rows: RowStates) -> SamplingMode:
        """Return how rows `slots` choose their next token."""
        needs = self._table.needs_of(slots)
        if needs & PROCESSING == Needs.MIN_TOKENS:
            masked = slots[self._table.rows_that_need(Needs.MIN_TOKENS, slots)]
            if not (rows.lengths[masked] < rows.stops_from[masked]).any():
                needs &= ~Needs.MIN_TOKENS
        if needs & PROCESSING:
            return SamplingMode.PROCESSED
        return SamplingMode.FILTERED if needs & _FILTERS else SamplingMode.PLAIN

    def reports(self, slots: RowIndices) -> bool:
        """Whether any of rows `slots` wants log probabilities."""
        return slots.size > 0 and bool(self._table.needs_of(slots) & Needs.LOGPROBS)

    def follow(self, slots: RowIndices, rows: RowStates) -> None:
        """Upload the masks of rows `slots` whose allowed tokens depend on their earlier tokens."""
        if self._processors is None:
            return
        banning = slots[self._bans_sequences[slots]].tolist()
        self._processors.ban({RowSlot(slot): self._table.words.ends(slot, rows) for slot in banning})
        held = slots[self._table.rows_that_need(Needs.GRAMMAR, slots)]
        if self._table.grammars is not None and held.size:
            masks = self._table.grammars.masks(held, rows)
            self._table.endings.mask(masks, held, rows)
            self._processors.set_grammar_masks(held, masks)

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, mode: SamplingMode) -> None:
        """Choose the next token of rows `slots` [rows] int32, into `token_ids` [rows] int32.

        Args:
            logits: [rows, vocabulary] in the model's type; left as they are.
            slots: the rows.
            token_ids: filled.
            mode: at least the one that the rows need.
        """
        assert self._processors is not None, "only asked of the rank that chooses"
        if mode is SamplingMode.PROCESSED:
            logits = self._processors.apply(logits, slots, self._rows.cells)
        self._chooser.choose(logits, slots, self._rows.cells, token_ids, filtered=mode is not SamplingMode.PLAIN)

    def report(self, logits: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, into: LogprobBuffers) -> None:
        """Compute the log probabilities of the tokens that rows `slots` have sampled."""
        report(logits, token_ids, self._named[slots.long()], into)

    def append(self, slots: torch.Tensor, token_ids: torch.Tensor, *, counts: bool) -> None:
        """Give rows `slots` their tokens; `counts` if any of them has penalties."""
        row_state.append(self._rows.cells, slots, token_ids)
        if counts and self._processors is not None:
            self._processors.count(slots, token_ids, self._rows.cells)

    def counts(self, slots: RowIndices) -> bool:
        """Whether any of rows `slots` has penalties, so that its tokens are counted."""
        return slots.size > 0 and bool(self._table.needs_of(slots) & Needs.PENALTIES)

    def launched(self, report: LogprobBuffers, slots: RowIndices, order: RowIndices) -> LaunchedLogprobs:
        """Return the pending log probabilities of rows `slots`; the i-th row's are in line `order[i]` of `report`."""
        asking = self._table.rows_that_need(Needs.LOGPROBS, slots)
        of = slots[asking]
        named = tuple(len(self._table.logprob_ids[slot]) for slot in of)
        tops = tuple(min(int(top), self._vocabulary_size) for top in self._table.top_logprobs[of])
        return LaunchedLogprobs(report, of, order[asking], tops, named)
