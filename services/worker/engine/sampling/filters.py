"""Which tokens may be drawn: top-k, then top-p of what top-k left, then min-p.

Each keeps a row's most likely tokens down to some probability, so together they are one threshold per row. Tokens of
equal probability are kept or dropped together, which makes the kept set independent of any sorting order.
"""

from __future__ import annotations

import torch

from services.worker.engine.sampling.order import sort_descending, top_entries

# How many of the largest probabilities are looked at, first for all rows, then for those that need more.
FIRST_LOOK = 64
SECOND_LOOK = 1024


def order_thresholds(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the least probability that top-k and top-p keep in each row, [rows] float32.

    Args:
        probabilities: [rows, entries] float32, entries in whole blocks (padding is 0).
        top_k: [rows] int64, at least 1; `entries` or more keeps all.
        top_p: [rows] float32, in (0, 1].
    """
    rows, entries = probabilities.shape
    thresholds = torch.empty(rows, dtype=torch.float32, device=probabilities.device)
    pending = torch.arange(rows, device=probabilities.device)
    for count in (FIRST_LOOK, SECOND_LOOK):
        if count * 8 > entries:
            continue
        subject = probabilities if pending.numel() == rows else probabilities[pending]
        top = top_entries(subject, count)[0]
        found, resolved = _search(top, top_k[pending], top_p[pending], entries)
        thresholds[pending[resolved]] = found[resolved]
        pending = pending[~resolved]
        if pending.numel() == 0:
            return thresholds
    everything = sort_descending(probabilities[pending])
    thresholds[pending] = _search(everything, top_k[pending], top_p[pending], entries)[0]
    return thresholds


def _search(
    top: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look for each row's threshold among its largest probabilities; also tell which rows have theirs among them."""
    count = top.shape[1]
    mass = top.cumsum(-1)
    limits_k, limits_p = top_k < entries, top_p < 1
    last_k = top_k.clamp(max=count) - 1
    kept_by_k = mass.gather(1, last_k[:, None])[:, 0]
    # Without top-k the mass is 1, whatever part of it was looked at.
    target = top_p * torch.where(limits_k, kept_by_k, 1.0)
    last_p = (mass < target[:, None]).sum(-1)
    resolved = torch.where(limits_k, top_k <= count, last_p < count)
    last = torch.where(limits_p, torch.minimum(last_p, last_k), last_k)
    return top.gather(1, last.clamp(max=count - 1)[:, None])[:, 0], resolved
