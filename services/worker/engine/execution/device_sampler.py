"""Sampling for the device batch, in one of a few modes, each of which can be captured as a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.types import RowSlot, TokenLogprob
from services.worker.engine.kernels.gpu import device_batch as row_state
from services.worker.engine.kernels.gpu.logits_processors import IN_PROMPT, LogitsProcessorTables, count, process_logits
from services.worker.engine.kernels.gpu.logprobs import MOST_NAMED, MOST_TOP, LogprobBuffers, report
from services.worker.engine.kernels.gpu.sampling import TokenChooser
from services.worker.engine.sampling.table import Needs
from services.worker.engine.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from common.steps import EngineSpec, RowOpen
    from services.worker.engine.execution.device_batch import DeviceBatch
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.sampling.table import SamplingTable

_FILTERS = Needs.ORDER | Needs.MIN_P
# The API's limit for one request.
MOST_BIASES = 1024
# Needs that logits processors on the device serve.
PROCESSING = Needs.PENALTIES | Needs.BIAS | Needs.MIN_TOKENS | Needs.GRAMMAR | Needs.CONSTRAINTS


class SamplingMode(Enum):
    """Ways in which the rows of a pass choose; each does all that the one before does."""

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
    """Samples on the device. Ranks that do not sample take the same decisions, and append the same tokens."""

    def __init__(self, spec: EngineSpec, rows: DeviceBatch, table: SamplingTable) -> None:
        """Sample for `rows`, whose parameters are in `table`; all memory is allocated here."""
        device, vocabulary_size = rows.cells.device, table.vocabulary_size
        self._rows = rows
        self._table = table
        self._vocabulary_size = vocabulary_size
        self._is_beyond = np.zeros(spec.max_rows, np.bool_)
        self._bans_sequences = np.zeros(spec.max_rows, np.bool_)
        self._processors: DeviceLogitsProcessors | None = None
        if not spec.samples:
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
        """Whether this rank's host needs all tokens of rows `slots`, to follow their grammars and banned sequences."""
        if slots.size == 0 or not self.chooses:
            return False
        follows = self._bans_sequences[slots].any() or bool(self._table.needs_of(slots) & Needs.GRAMMAR)
        return bool(follows) or not self.can_choose(slots)

    def mode_of(self, slots: RowIndices, rows: RowStates) -> SamplingMode:
        """Return the sampling parameters of rows `slots`."""
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


def bans_sequences(opened: RowOpen) -> bool:
    """Whether a row bans sequences of several tokens: its mask then depends on its earlier tokens."""
    return any(len(sequence) > 1 for sequence in opened.sampling.banned_sequences)


class DeviceLogitsProcessors:
    """Tables of penalties, biases and masks, one line for each row; `upload` sends changes, in the stream's order.

    Lines are written when rows are opened. The device counts sampled tokens itself; only the tokens that a grammar
    allows next, and those that would end a banned sequence, are uploaded before every pass.
    """

    def __init__(self, max_rows: int, vocabulary_size: int, device: torch.device) -> None:
        """Make a line for each of `max_rows` rows; see `measuring/capacity.py` for the memory it takes."""
        self._vocabulary_size = vocabulary_size
        self._words = -(-vocabulary_size // 32)

        def bits() -> torch.Tensor:
            return torch.full((max_rows, self._words), -1, dtype=torch.int32, device=device)

        self._tables = LogitsProcessorTables(
            counts=torch.zeros(max_rows, vocabulary_size, dtype=torch.int32, device=device),
            allowed=bits(),
            before_minimum=bits(),
            grammar=bits(),
            bias_ids=torch.full((max_rows, MOST_BIASES), -1, dtype=torch.int32, device=device),
            bias_values=torch.zeros(max_rows, MOST_BIASES, dtype=torch.float32, device=device),
        )
        self._processed = torch.empty(max_rows, vocabulary_size, dtype=torch.float32, device=device)
        self._opened: dict[RowSlot, tuple[RowOpen, Needs]] = {}
        # [vocabulary, in whole words] uint8: the constant part of the mask of rows that ban sequences.
        self._flags: dict[RowSlot, NDArray[np.uint8]] = {}

    def open(self, opened: RowOpen, needs: Needs) -> None:
        """Queue a row's parameters for the next upload; `needs` are its kinds of processing."""
        self._opened.pop(opened.row, None)
        self._flags.pop(opened.row, None)
        if bans_sequences(opened):
            self._flags[opened.row] = self._allowed(opened)
        if needs & PROCESSING:
            self._opened[opened.row] = opened, needs

    def upload(self) -> None:
        """Send the queued changes; later launches see them."""
        if not self._opened:
            return
        for opened in self._gathered(Needs.PENALTIES):
            self._seed_counts(opened)
        tables = self._tables
        self._write(tables.allowed, {one.row: _packed(self._allowed(one)) for one in self._gathered(Needs.CONSTRAINTS)})
        stops = {one.row: self._bits_without(one.stop_token_ids) for one in self._gathered(Needs.MIN_TOKENS)}
        self._write(tables.before_minimum, stops)
        biases = {one.row: self._biases(one) for one in self._gathered(Needs.BIAS)}
        self._write(tables.bias_ids, {row: _padded(list(bias), np.int32, -1) for row, bias in biases.items()})
        values = {row: _padded(list(bias.values()), np.float32, 0) for row, bias in biases.items()}
        self._write(tables.bias_values, values)
        self._opened = {}

    def set_grammar_masks(self, slots: RowIndices, masks: NDArray[np.int32]) -> None:
        """Upload the grammar masks [slots, words] of the next token of rows `slots`."""
        device = self._tables.grammar.device
        self._tables.grammar.index_copy_(0, to_device(slots.astype(np.int64), device), to_device(masks, device))

    def ban(self, ends: Mapping[RowSlot, Sequence[int]]) -> None:
        """Ban `ends`, the last tokens of banned sequences, for the next token; always banned tokens stay banned."""
        lines = {}
        for row, ids in ends.items():
            flags = self._flags[row].copy()
            flags[self._in_vocabulary(ids)] = 0
            lines[row] = _packed(flags)
        self._write(self._tables.allowed, lines)

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """Return the processed logits of rows `slots`, [rows, vocabulary] float32, valid until the next call."""
        processed = self._processed[: logits.shape[0]]
        process_logits(logits, slots, cells, self._tables, processed)
        return processed

    def count(self, slots: torch.Tensor, token_ids: torch.Tensor, cells: torch.Tensor) -> None:
        """Count the tokens that rows `slots` have sampled."""
        count(slots, cells, token_ids, self._tables)

    def _gathered(self, need: Needs) -> list[RowOpen]:
        return [opened for opened, needs in self._opened.values() if needs & need]

    def _seed_counts(self, opened: RowOpen) -> None:
        line = self._tables.counts[opened.row]
        prompt, length = opened.prompt_tokens, opened.token_ids.size
        ids = to_device(opened.token_ids.astype(np.int64), line.device)
        line.zero_()
        line.index_fill_(0, ids[:prompt], IN_PROMPT)
        if length > prompt:
            # A row that was preempted or resumed has output already.
            line.index_add_(0, ids[prompt:], torch.ones(length - prompt, dtype=torch.int32, device=line.device))

    def _biases(self, opened: RowOpen) -> dict[int, float]:
        bias = opened.sampling.logit_bias
        return {id_: bias[id_] for id_ in self._in_vocabulary(bias)}

    def _allowed(self, opened: RowOpen) -> NDArray[np.uint8]:
        sampling = opened.sampling
        flags = np.zeros(self._words * 32, np.uint8)
        if sampling.allowed_token_ids:
            flags[self._in_vocabulary(sampling.allowed_token_ids)] = 1
        else:
            flags[:] = 1
        flags[self._in_vocabulary(banned[0] for banned in sampling.banned_sequences if len(banned) == 1)] = 0
        return flags

    def _bits_without(self, ids: Iterable[int]) -> NDArray[np.int32]:
        flags = np.ones(self._words * 32, np.uint8)
        flags[self._in_vocabulary(ids)] = 0
        return _packed(flags)

    def _in_vocabulary(self, ids: Iterable[int]) -> list[int]:
        return [id_ for id_ in ids if 0 <= id_ < self._vocabulary_size]

    @staticmethod
    def _write(table: torch.Tensor, lines: Mapping[RowSlot, NDArray[Any]]) -> None:
        if lines:
            places = to_device(np.array(list(lines), np.int64), table.device)
            table.index_copy_(0, places, to_device(np.stack(list(lines.values())), table.device))


def _packed(flags: NDArray[np.uint8]) -> NDArray[np.int32]:
    return np.packbits(flags, bitorder="little").view(np.int32)


def _padded(values: list[int] | list[float], dtype: type[np.generic], fill: float) -> NDArray[Any]:
    padded = np.full(MOST_BIASES, fill, dtype)
    padded[: len(values)] = values
    return padded
