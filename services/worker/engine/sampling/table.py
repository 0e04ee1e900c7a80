"""Sampling parameters of every row, as arrays indexed by row slot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.plans.rows import PaddedTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from common.steps import RowOpen
    from services.worker.engine.grammars.row_masks import RowMasks
    from services.worker.engine.plans.rows import RowIndices, RowStates

# Below this a temperature would overflow: argmax is used instead.
LEAST_TEMPERATURE = 1e-5
# A top_k beyond any vocabulary.
KEEP_ALL = 2**62


class Needs(IntFlag):
    """The steps that a row's sampling needs beyond argmax."""

    NOTHING = 0
    DRAW = 1
    # top_k or top_p: the value of the last token kept must be found.
    ORDER = 2
    MIN_P = 4
    PENALTIES = 8
    BIAS = 16
    # Stop ids are masked while the row is shorter than its minimum.
    MIN_TOKENS = 32
    LOGPROBS = 64
    GRAMMAR = 128
    # Allowed token ids or banned sequences.
    CONSTRAINTS = 256


class SamplingTable:
    """One entry per slot in each array; those of free slots mean nothing."""

    def __init__(self, max_rows: int, vocabulary_size: int, grammars: RowMasks | None = None) -> None:
        """Make room for `max_rows` rows. Without `grammars` rows' grammars are ignored."""
        self.vocabulary_size = vocabulary_size
        self.grammars = grammars
        self.needs = np.zeros(max_rows, np.uint16)
        self.seeds = np.zeros(max_rows, np.uint64)
        self.temperature = np.ones(max_rows, np.float32)
        self.top_k = np.full(max_rows, KEEP_ALL, np.int64)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.repetition_penalty = np.ones(max_rows, np.float32)
        self.presence_penalty = np.zeros(max_rows, np.float32)
        self.frequency_penalty = np.zeros(max_rows, np.float32)
        # Padded with a bias of 0 on token 0.
        self.bias_ids = PaddedTable(max_rows, np.int64, fill=0)
        self.bias_values = PaddedTable(max_rows, np.float32, fill=0.0)
        # Padded with the row's first stop id, since masking twice changes nothing.
        self.masked_ids = PaddedTable(max_rows, np.int64, fill=0)
        self.top_logprobs = np.zeros(max_rows, np.int64)
        # Ids whose log probabilities are reported, too.
        self.logprob_ids: list[tuple[int, ...]] = [()] * max_rows
        self.words = TokenConstraints()
        self.endings = PostponedStops(vocabulary_size)

    def open(self, opened: RowOpen) -> None:
        row, sampling = opened.row, opened.sampling
        self.seeds[row] = sampling.seed
        self.temperature[row] = sampling.temperature
        top_k = sampling.top_k or KEEP_ALL
        self.top_k[row] = top_k if top_k < self.vocabulary_size else KEEP_ALL
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.top_logprobs[row] = sampling.top_logprobs or 0
        self.logprob_ids[row] = sampling.logprob_token_ids
        self.words.open(opened)
        self.endings.open(opened)
        self._set_bias(opened)
        if self.grammars is not None:
            self.grammars.open(opened)
        # Rows with grammars postpone them instead, since their grammar may allow nothing else.
        has_minimum = opened.min_new_tokens > 0 and sampling.grammar is None
        masked = self._in_vocabulary(opened.stop_token_ids) if has_minimum else np.empty(0, np.int64)
        self.masked_ids.set(row, masked, padding=masked[0] if masked.size else 0)
        self.needs[row] = self._needs_of(opened, has_masked_ids=masked.size > 0)

    def needs_of(self, rows: NDArray[np.int64]) -> Needs:
        """Return the union of the needs of `rows`."""
        return Needs(int(np.bitwise_or.reduce(self.needs[rows])))

    def rows_that_need(self, need: Needs, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices into `rows` of those that need any of `need`."""
        return np.flatnonzero(self.needs[rows] & need)

    def _set_bias(self, opened: RowOpen) -> None:
        bias = {id_: value for id_, value in opened.sampling.logit_bias.items() if 0 <= id_ < self.vocabulary_size}
        self.bias_ids.set(opened.row, np.fromiter(bias.keys(), np.int64, len(bias)))
        self.bias_values.set(opened.row, np.fromiter(bias.values(), np.float32, len(bias)))

    def _in_vocabulary(self, ids: tuple[int, ...]) -> NDArray[np.int64]:
        return np.array([id_ for id_ in ids if 0 <= id_ < self.vocabulary_size], np.int64)

    def _needs_of(self, opened: RowOpen, *, has_masked_ids: bool) -> Needs:
        sampling = opened.sampling
        needs = Needs.NOTHING
        if sampling.temperature >= LEAST_TEMPERATURE:
            needs |= Needs.DRAW
            if self.top_k[opened.row] != KEEP_ALL or sampling.top_p < 1:
                needs |= Needs.ORDER
            if sampling.min_p > 0:
                needs |= Needs.MIN_P
        if sampling.has_penalties:
            needs |= Needs.PENALTIES
        if sampling.logit_bias:
            needs |= Needs.BIAS
        if has_masked_ids:
            needs |= Needs.MIN_TOKENS
        if sampling.top_logprobs is not None:
            needs |= Needs.LOGPROBS
        if sampling.grammar is not None:
            needs |= Needs.GRAMMAR
        if sampling.allowed_token_ids or sampling.banned_sequences:
            needs |= Needs.CONSTRAINTS
        return needs


# Not minus infinity: if other masks banned all allowed tokens, a row would have no distribution.
BANNED_LOGIT = -1e30


class TokenConstraints:
    """Allowed token ids and banned sequences of the rows that have any."""

    def __init__(self) -> None:
        self._allowed: dict[int, torch.Tensor] = {}
        self._banned: dict[int, tuple[tuple[int, ...], ...]] = {}

    def open(self, opened: RowOpen) -> None:
        """Store a row's constraints."""
        sampling = opened.sampling
        self._allowed.pop(opened.row, None)
        if sampling.allowed_token_ids:
            self._allowed[opened.row] = torch.tensor(sampling.allowed_token_ids, dtype=torch.int64)
        self._banned[opened.row] = sampling.banned_sequences

    def apply(self, logits: torch.Tensor, samples: NDArray[np.int64], slots: RowIndices, rows: RowStates) -> None:
        """Set the logits of tokens that rows `slots` may not sample to BANNED_LOGIT in `logits[samples]`, in place.

        Only what a row has generated counts as the beginning of a banned sequence.
        """
        for sample, slot in zip(samples.tolist(), slots.tolist(), strict=True):
            row = logits[sample]
            if slot in self._allowed:
                kept = self._allowed[slot].to(logits.device)
                values = row[kept]
                row.fill_(BANNED_LOGIT)
                row[kept] = values
            ends = self.ends(slot, rows)
            if ends:
                row[torch.tensor(ends, device=logits.device)] = BANNED_LOGIT

    def ends(self, slot: int, rows: RowStates) -> list[int]:
        """Return the ids with which a row would now end a sequence that it bans."""
        generated = rows.token_ids[slot, rows.prompt_tokens[slot] : rows.lengths[slot]]
        return [
            sequence[-1]
            for sequence in self._banned[slot]
            if len(sequence) <= generated.size + 1
            and tuple(generated[generated.size + 1 - len(sequence) :].tolist()) == sequence[:-1]
        ]


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Row:
    """Ids postponed while the row has fewer than `until` tokens, and ids always postponed."""

    early: NDArray[np.int64]
    until: int
    always: NDArray[np.int64]


class PostponedStops:
    """Stop ids that rows with grammars postpone while the grammar allows anything else."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._rows: dict[int, _Row] = {}

    def open(self, opened: RowOpen) -> None:
        """Store a row's postponed ids in place of those of the slot's former row."""
        self._rows.pop(opened.row, None)
        if opened.sampling.grammar is None:
            return
        early = self._in_vocabulary(opened.stop_token_ids) if opened.min_new_tokens else _NONE
        always = self._in_vocabulary(opened.postponed_token_ids)
        if early.size or always.size:
            until = opened.prompt_tokens + opened.min_new_tokens
            self._rows[opened.row] = _Row(np.concatenate([early, always]), until, always)

    def mask(self, masks: NDArray[np.int32], slots: RowIndices, rows: RowStates) -> None:
        """Clear the bits of postponed stop ids in rows' masks, in place, unless that would clear all bits of a row.

        Args:
            masks: [slots, words] int32, as `RowMasks.masks` returns them.
            slots: [slots] the rows they belong to.
            rows: what the rows hold.
        """
        for mask, slot in zip(masks, slots.tolist(), strict=True):
            row = self._rows.get(slot)
            if row is not None:
                remaining = _without(mask, row.early if rows.lengths[slot] < row.until else row.always)
                if remaining.any():
                    mask[:] = remaining

    def _in_vocabulary(self, ids: Iterable[int]) -> NDArray[np.int64]:
        return np.array([id_ for id_ in ids if 0 <= id_ < self._vocabulary_size], np.int64)


def _without(mask: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.int32]:
    words = mask.view(np.uint32).copy()
    # Unbuffered: several ids may be of one word.
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
    return words.view(np.int32)
