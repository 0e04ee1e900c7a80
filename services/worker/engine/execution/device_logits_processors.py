"""Logits processors on the device: tables of penalties, biases and masks, one line for each row.

Lines are written when rows are opened. The device counts sampled tokens itself; only the tokens that a grammar allows
next, and those that would end a banned sequence, are uploaded before every pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.types import RowSlot
from services.worker.engine.execution.device_batch import to_device
from services.worker.engine.kernels.gpu.logits_processors import IN_PROMPT, LogitsProcessorTables, count, process_logits
from services.worker.engine.sampling.table import Needs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from common.steps import RowOpen
    from services.worker.engine.plans.rows import RowIndices

# The API's limit for one request.
MOST_BIASES = 1024
# Needs that logits processors on the device serve.
PROCESSING = Needs.PENALTIES | Needs.BIAS | Needs.MIN_TOKENS | Needs.GRAMMAR | Needs.CONSTRAINTS


def bans_sequences(opened: RowOpen) -> bool:
    """Whether a row bans sequences of several tokens: its mask then depends on its earlier tokens."""
    return any(len(sequence) > 1 for sequence in opened.sampling.banned_sequences)


class DeviceLogitsProcessors:
    """Owns the tables; changes gather until `upload` sends them, in the order of the stream."""

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
        lines = {RowSlot(slot): mask for slot, mask in zip(slots.tolist(), masks, strict=True)}
        self._write(self._tables.grammar, lines)

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
