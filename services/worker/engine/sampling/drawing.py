"""Drawing a token: top-k, top-p over the tokens that top-k keeps, min-p, then inversion of the cumulative distribution.

The filters together are one probability threshold per row: tokens of equal probability are kept or dropped together, so
the kept set does not depend on any sorting order.
"""

from __future__ import annotations

import torch

# Entries per block. A power of two that divides most vocabularies; 64 keeps both levels of the search short.
BLOCK = 64


def pad_to_blocks(values: torch.Tensor, fill: float) -> torch.Tensor:
    """Return `values` [rows, entries] with entries rounded up to whole blocks; the same tensor if they are already."""
    missing = -values.shape[1] % BLOCK
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing else values


def top_entries(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest entries of each row and their indices, both [rows, count], largest first.

    Args:
        values: [rows, entries], entries a multiple of BLOCK.
        count: at most `entries`.
    """
    rows, entries = values.shape
    if count * BLOCK * 2 > entries:
        return torch.topk(values, count)
    # An entry among the `count` largest lies in one of the `count` blocks with the largest maxima: otherwise each of
    # those would hold an entry at least as large.
    blocks = values.view(rows, entries // BLOCK, BLOCK)
    chosen = torch.topk(blocks.amax(-1), count, sorted=False).indices
    if values.device.type != "cpu":
        # In which order a GPU finds them depends on the number of rows, and with it the choice among equal entries.
        chosen = chosen.sort(dim=1).values
    candidates = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).view(rows, count * BLOCK)
    top, at = torch.topk(candidates, count)
    return top, chosen.gather(1, at // BLOCK) * BLOCK + at % BLOCK


def sort_descending(values: torch.Tensor) -> torch.Tensor:
    """Return each row of `values` sorted, largest first."""
    if values.device.type != "cpu":
        return torch.sort(values, descending=True).values
    # numpy sorts float32 with vector instructions, three times faster than torch does on the CPU.
    ascending = values.numpy().copy()
    ascending.sort(axis=-1)
    return torch.from_numpy(ascending).flip(-1)


# Numbers of largest probabilities that are searched, first for all rows, then for unresolved ones.
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
    """Return each row's threshold among its largest probabilities, and which rows have theirs among them."""
    count = top.shape[1]
    mass = top.cumsum(-1)
    limits_k, limits_p = top_k < entries, top_p < 1
    last_k = top_k.clamp(max=count) - 1
    kept_by_k = mass.gather(1, last_k[:, None])[:, 0]
    # Without top-k the mass is 1, though only a part of it was summed.
    target = top_p * torch.where(limits_k, kept_by_k, 1.0)
    last_p = (mass < target[:, None]).sum(-1)
    resolved = torch.where(limits_k, top_k <= count, last_p < count)
    last = torch.where(limits_p, torch.minimum(last_p, last_k), last_k)
    return top.gather(1, last.clamp(max=count - 1)[:, None])[:, 0], resolved


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's cumulative weight exceeds its uniform share of the total, [rows] int64.

    An entry of weight 0 is never drawn. The search goes by blocks: sums of blocks cost one pass over the weights, a
    cumulative sum of all of them would cost many times that.

    Args:
        weights: [rows, entries] float32, at least 0, entries in whole blocks; need not sum to 1.
        uniforms: [rows] float32 in [0, 1).
    """
    rows, entries = weights.shape
    blocks = weights.view(rows, entries // BLOCK, BLOCK)
    mass = blocks.sum(-1).cumsum(-1)
    target = uniforms * mass[:, -1]
    block = _invert(mass, target)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inner = blocks.gather(1, block[:, None, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    return block * BLOCK + _invert(inner, target - before)


def _invert(mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row whose cumulative mass exceeds the target.

    Rounding may leave none; then it is the first index that has all the mass, which is the last with a weight.
    """
    beyond = (mass <= target[:, None]).sum(-1)
    final = (mass < mass[:, -1:]).sum(-1)
    return torch.minimum(beyond, final)
