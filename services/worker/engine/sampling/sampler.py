"""Choosing the next token of each row: a pure function of logits, the row's parameters and ids, seed and position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.sampling.drawing import draw, order_thresholds, pad_to_blocks
from services.worker.engine.sampling.logits_processors import add_bias, mask_grammars, mask_stops, penalise
from services.worker.engine.sampling.logprobs import token_logprobs
from services.worker.engine.sampling.table import Needs, SamplingTable

if TYPE_CHECKING:
    from common.types import RowSlot, TokenLogprob
    from services.worker.engine.plans.rows import RowIndices, RowStates

Words = NDArray[np.uint64]

ROUNDS = 10
_MASK = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
# Multipliers of the two halves of the counter, and what is added to the two halves of the key in each round.
_MULTIPLIERS = np.array([[0xD251_1F53], [0xCD9E_8D57]], np.uint64)
_WEYL = np.array([0x9E37_79B9, 0xBB67_AE85], np.uint64)


@dataclass(frozen=True, slots=True)
class Samples:
    """One token for each row of logits, [rows] int64 on the logits' device, and the requested log probabilities."""

    token_ids: torch.Tensor
    logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()


def sample(logits: torch.Tensor, slots: RowIndices, rows: RowStates, table: SamplingTable) -> Samples:
    """Choose the next token of rows `slots`.

    Args:
        logits: [rows, vocabulary] float32, contiguous; overwritten.
        slots: [rows] the row slots they belong to, each once.
        rows: what the rows hold; a row's next position is its length.
        table: their parameters.
    """
    needs = table.needs_of(slots)
    if needs == Needs.NOTHING:
        return Samples(logits.argmax(dim=-1))
    reporting = table.rows_that_need(Needs.LOGPROBS, slots)
    unmodified = logits[_index(reporting, logits)] if reporting.size else None
    _process(logits, slots, rows, table, needs)
    token_ids = _choose(logits, slots, rows, table)
    if unmodified is None:
        return Samples(token_ids)
    wanted = slots[reporting]
    chosen = token_ids[_index(reporting, logits)]
    asked = [table.logprob_ids[slot] for slot in wanted]
    return Samples(token_ids, token_logprobs(unmodified, chosen, wanted, table.top_logprobs[wanted], asked))


def _process(logits: torch.Tensor, slots: RowIndices, rows: RowStates, table: SamplingTable, needs: Needs) -> None:
    if needs & Needs.PENALTIES:
        samples = table.rows_that_need(Needs.PENALTIES, slots)
        penalise(logits, samples, slots[samples], rows, table)
    if needs & Needs.BIAS:
        samples = table.rows_that_need(Needs.BIAS, slots)
        add_bias(logits, samples, slots[samples], table)
    if needs & Needs.CONSTRAINTS:
        samples = table.rows_that_need(Needs.CONSTRAINTS, slots)
        table.words.apply(logits, samples, slots[samples], rows)
    if needs & Needs.MIN_TOKENS:
        samples = table.rows_that_need(Needs.MIN_TOKENS, slots)
        samples = samples[rows.lengths[slots[samples]] < rows.stops_from[slots[samples]]]
        mask_stops(logits, samples, slots[samples], table)
    if needs & Needs.GRAMMAR and table.grammars is not None:
        samples = table.rows_that_need(Needs.GRAMMAR, slots)
        mask_grammars(logits, samples, slots[samples], rows, table.grammars, table.endings)


def _choose(logits: torch.Tensor, slots: RowIndices, rows: RowStates, table: SamplingTable) -> torch.Tensor:
    drawing = table.rows_that_need(Needs.DRAW, slots)
    if drawing.size == 0:
        return logits.argmax(dim=-1)
    if drawing.size == slots.size:
        return _draw(logits, slots, rows, table)
    # Greedy rows are gathered separately, so that they cost no exponentials.
    greedy = np.setdiff1d(np.arange(slots.size), drawing, assume_unique=True)
    token_ids = torch.empty(slots.size, dtype=torch.int64, device=logits.device)
    at_greedy, at_drawing = _index(greedy, logits), _index(drawing, logits)
    token_ids[at_greedy] = logits[at_greedy].argmax(dim=-1)
    token_ids[at_drawing] = _draw(logits[at_drawing], slots[drawing], rows, table)
    return token_ids


def _draw(logits: torch.Tensor, slots: RowIndices, rows: RowStates, table: SamplingTable) -> torch.Tensor:
    temperature = _tensor(table.temperature[slots], logits)
    probabilities = pad_to_blocks(torch.softmax(logits.div_(temperature[:, None]), dim=-1), 0.0)
    filtering = table.rows_that_need(Needs.ORDER | Needs.MIN_P, slots)
    if filtering.size == slots.size:
        probabilities = _filtered(probabilities, slots, table)
    elif filtering.size:
        at = _index(filtering, logits)
        probabilities[at] = _filtered(probabilities[at], slots[filtering], table)
    return draw(probabilities, _tensor(uniforms(table.seeds[slots], rows.lengths[slots]), logits))


def _filtered(probabilities: torch.Tensor, slots: RowIndices, table: SamplingTable) -> torch.Tensor:
    """Return `probabilities` with 0 for tokens that the rows' filters drop."""
    thresholds = _tensor(table.min_p[slots], probabilities) * probabilities.amax(dim=-1)
    ordering = table.rows_that_need(Needs.ORDER, slots)
    if ordering.size:
        at = _index(ordering, probabilities)
        subject = probabilities if ordering.size == slots.size else probabilities[at]
        of = slots[ordering]
        found = order_thresholds(subject, _tensor(table.top_k[of], subject), _tensor(table.top_p[of], subject))
        thresholds[at] = torch.maximum(thresholds[at], found)
    # Comparing into floats and multiplying takes a fifth of the time of `where` on the CPU.
    kept = torch.empty_like(probabilities)
    torch.ge(probabilities, thresholds[:, None], out=kept)
    return kept.mul_(probabilities)


def _index(positions: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(positions).to(like.device)


def _tensor(values: NDArray[np.float32] | NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)


def philox4x32(key: Words, counter: Words) -> Words:
    """Return four 32-bit words per counter, of the counter-based generator Philox4x32-10.

    Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        key: [2, n] values below 2^32, in uint64 so that products of two of them fit.
        counter: [4, n] likewise.

    Returns:
        [4, n] likewise.
    """
    keys = (key[None] + np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL[:, None]) & _MASK
    multiplied, mixed = counter[0::2], counter[1::2]
    for round_key in keys:
        product = multiplied * _MULTIPLIERS
        multiplied, mixed = (product >> _HALF)[::-1] ^ mixed ^ round_key, (product & _MASK)[::-1]
    words = np.empty_like(counter)
    words[0::2], words[1::2] = multiplied, mixed
    return words


def uniforms(seeds: Words, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return one number in [0, 1) for each pair of seed and token position, [n] float32 with 24 random bits."""
    key = np.stack([seeds & _MASK, seeds >> _HALF])
    counter = np.zeros((4, seeds.size), np.uint64)
    counter[0] = positions
    words = philox4x32(key, counter)
    # 24 bits fill a float32 exactly, so that rounding never reaches 1.
    shares: NDArray[np.float32] = (words[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return shares
