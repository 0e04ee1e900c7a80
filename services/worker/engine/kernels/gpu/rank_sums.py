"""The end of each half of a layer under tensor parallelism as one program: all-reduce, residual sum, RMS norm.

Ranks synchronize row by row: a program signals to those of the same row on other ranks that its partial sums are there,
waits until theirs are, and reads all parts over the bus between the GPUs. Every rank adds in the same order, so that
all hold the very same sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options

if TYPE_CHECKING:
    from collections.abc import Sequence


# How often a program of a check looks for the others: a second or two. In passes it looks until they are there.
_PATIENCE = 1 << 21


@triton.jit(do_not_specialize=["rank"])
def _sum_add_norm(
    hidden, weight, normed, own_pad, buffers, pads, epochs, epsilon, rank,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr, PATIENCE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    element = hidden.dtype.element_ty
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    if OVERLAPS:
        follow()
    # Counts the meetings of this row, alike on all ranks; after a day or two it begins again below zero, so that only
    # differences show which rank is late.
    epoch = tl.load(epochs + row) + 1
    for peer in tl.static_range(WORLD):
        pad = tl.load(pads + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pad + row * WORLD + rank, epoch, sem="release", scope="sys")
    residual = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    for peer in tl.static_range(WORLD):
        if PATIENCE:
            seen = tl.atomic_add(own_pad + row * WORLD + peer, 0, sem="acquire", scope="sys")
            tries = 0
            while (seen - epoch < 0) & (tries < PATIENCE):
                seen = tl.atomic_add(own_pad + row * WORLD + peer, 0, sem="acquire", scope="sys")
                tries += 1
        else:
            while tl.atomic_add(own_pad + row * WORLD + peer, 0, sem="acquire", scope="sys") - epoch < 0:
                pass
    # No thread reads before the one that has looked.
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(WORLD):
        buffer = tl.load(buffers + peer).to(tl.pointer_type(element))
        # Stated, since loaded addresses have no known alignment.
        theirs = tl.max_contiguous(tl.multiple_of(buffer + at, 16), 8)
        total += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    summed = (residual + total).to(element)
    tl.store(hidden + at, summed, mask=inside)
    wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + epsilon)
    tl.store(normed + at, (wide * scale).to(element) * factors, mask=inside)
    tl.store(epochs + row, epoch)


class RankSums:
    """Sums over ranks into the residual stream, for passes of few tokens.

    Two buffers take turns: when a rank writes to one again, all have met at the other, so that no rank reads it any
    more. Passes have an even number of sums, so that they all begin with the same one.
    """

    def __init__(
        self,
        rank: int,
        turns: Sequence[tuple[torch.Tensor, torch.Tensor]],
        pads: tuple[torch.Tensor, torch.Tensor],
        rows: int,
    ) -> None:
        """Use memory of all ranks: ours, and [ranks] int64 addresses of everybody's.

        Args:
            rank: ours.
            turns: two buffers for the activations of `rows` tokens.
            pads: [rows, ranks] int32, zeros before anybody begins.
            rows: most tokens of a pass.
        """
        self.rows = rows
        self._rank = rank
        self._turns = turns
        self._pads = pads
        self._epochs = torch.zeros(rows, dtype=torch.int32, device=pads[0].device)
        self._turn = 0

    def place(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return where this rank's partial sums have to be for the next `add`, of the shape of `hidden`."""
        self._turn = 1 - self._turn
        return self._turns[self._turn][0][: hidden.numel()].view(hidden.shape)

    def add(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Add what is in all ranks' `place` to `hidden` [tokens, hidden] in place; return its norm with `weight`."""
        return self._add(hidden, weight, epsilon, patience=0)

    def check(self, width: int, dtype: torch.dtype) -> bool:
        """Return whether sums of known numbers are right; all ranks call this at the same time, and none can hang."""
        device, ranks = self._epochs.device, self._pads[1].shape[0]
        total = ranks * (ranks + 1) // 2
        is_right = True
        for call in range(4):
            tokens = min(5 - call, self.rows)
            numbers = torch.arange(1, tokens + 1, device=device, dtype=dtype)[:, None]
            hidden = torch.ones(tokens, width, dtype=dtype, device=device)
            self.place(hidden).copy_(numbers * (self._rank + 1))
            self._add(hidden, torch.ones(width, dtype=dtype, device=device), 0.0, patience=_PATIENCE)
            is_right = is_right and torch.equal(hidden, (numbers * total + 1).expand(tokens, width))
        return is_right

    def _add(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, patience: int) -> torch.Tensor:
        tokens, width = hidden.shape
        normed = torch.empty_like(hidden)
        block = triton.next_power_of_2(width)
        (_, buffers), (own_pad, pads) = self._turns[self._turn], self._pads
        _sum_add_norm[(tokens,)](
            hidden, weight, normed, own_pad, buffers, pads, self._epochs, epsilon, self._rank,
            WIDTH=width, BLOCK=block, WORLD=pads.shape[0], PATIENCE=patience, num_warps=min(max(block // 512, 1), 8),
            **launch_options(tokens),
        )  # fmt: skip
        return normed
