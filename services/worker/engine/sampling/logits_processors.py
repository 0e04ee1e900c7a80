"""Logits processors on the host, in place: penalties, biases, banned and allowed tokens, stop ids, grammar masks."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.worker.engine.grammars.row_masks import RowMasks
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.sampling.table import PostponedStops, SamplingTable


def penalise(
    logits: torch.Tensor, samples: NDArray[np.int64], slots: RowIndices, rows: RowStates, table: SamplingTable
) -> None:
    """Apply repetition, frequency and presence penalties in place to `logits[samples]`, which belong to rows `slots`.

    Repetition (Keskar et al., "CTRL", 2019, section 4.1) divides positive logits of every token in prompt or output
    and multiplies negative ones; frequency and presence, as the OpenAI API defines them, count the output only.
    Costs time by the rows' lengths, not by the vocabulary.
    """
    flat = logits.view(-1)
    repeating = np.flatnonzero(table.repetition_penalty[slots] != 1)
    if repeating.size:
        of = slots[repeating]
        at = _places(logits, samples[repeating], rows, of, first=np.zeros(of.size, np.int64))
        penalty = _column(table.repetition_penalty[of], logits)
        seen = flat[at]
        # A token that occurs twice is written twice, with the same value.
        flat[at] = torch.where(seen > 0, seen / penalty, seen * penalty)
    counting = (table.presence_penalty[slots] != 0) | (table.frequency_penalty[slots] != 0)
    counting = np.flatnonzero(counting & (rows.lengths[slots] > rows.prompt_tokens[slots]))
    if counting.size:
        of = slots[counting]
        first = rows.prompt_tokens[of]
        at = _places(logits, samples[counting], rows, of, first)
        flat[at] = flat[at] - _column(table.presence_penalty[of], logits)
        real = np.arange(at.shape[1]) < (rows.lengths[of] - first)[:, None]
        amounts = np.where(real, -table.frequency_penalty[of][:, None], np.float32(0))
        flat.index_put_((at,), torch.from_numpy(amounts).to(logits.device), accumulate=True)


def add_bias(logits: torch.Tensor, samples: NDArray[np.int64], slots: RowIndices, table: SamplingTable) -> None:
    """Add logit_bias in place."""
    at = _offsets(logits, samples, table.bias_ids.values[slots])
    values = torch.from_numpy(table.bias_values.values[slots]).to(logits.device)
    logits.view(-1).index_put_((at,), values, accumulate=True)


def mask_stops(logits: torch.Tensor, samples: NDArray[np.int64], slots: RowIndices, table: SamplingTable) -> None:
    """Make the rows' stop ids impossible, in place."""
    at = _offsets(logits, samples, table.masked_ids.values[slots])
    logits.view(-1)[at] = -torch.inf


def _places(
    logits: torch.Tensor, samples: NDArray[np.int64], rows: RowStates, slots: RowIndices, first: NDArray[np.int64]
) -> torch.Tensor:
    """Return where the logits of each row's ids [first, length) are, as flat indices [rows, longest].

    Shorter rows repeat their last id.
    """
    lengths = rows.lengths[slots]
    columns = first[:, None] + np.arange(int((lengths - first).max()))
    ids = rows.token_ids[slots[:, None], np.minimum(columns, lengths[:, None] - 1)]
    return _offsets(logits, samples, ids)


def _offsets(logits: torch.Tensor, samples: NDArray[np.int64], ids: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(samples[:, None] * logits.shape[1] + ids).to(logits.device)


def _column(values: NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values[:, None]).to(like.device)


def mask_grammars(
    logits: torch.Tensor,
    samples: NDArray[np.int64],
    slots: RowIndices,
    rows: RowStates,
    masks: RowMasks,
    endings: PostponedStops,
) -> None:
    """Mask `logits[samples]`, which belong to rows `slots`, by the rows' grammars, in place."""
    allowed = masks.masks(slots, rows)
    endings.mask(allowed, slots, rows)
    apply_masks(logits, samples, allowed)


def apply_masks(logits: torch.Tensor, samples: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
    """Make the logits whose bit is not set in `masks`, [samples, words] int32, minus infinity, in place."""
    octets = torch.from_numpy(masks.view(np.uint8)).to(logits.device, non_blocking=True).int()
    # Looking up what each byte adds to eight logits takes a fifth of the time of spreading bits out and comparing.
    added = torch.nn.functional.embedding(octets, _amounts(logits.device)).view(len(samples), -1)
    added = added[:, : logits.shape[1]]
    if len(samples) == len(logits):
        logits.add_(added)
    else:
        logits.index_add_(0, torch.from_numpy(samples).to(logits.device), added)


@cache
def _amounts(device: torch.device) -> torch.Tensor:
    """Return the summands (0 or -inf) that each value of a mask's byte stands for, [256, 8] float32."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf))).to(device)
