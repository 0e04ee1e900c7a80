"""Jump-forward: tokens that grammars force after sampled ones, in one array that rank 0 broadcasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.plans.rows import NOTHING_FORCED, ForcedTokens
from services.worker.engine.sampling.table import Needs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.types import TokenIds
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.sampling.table import SamplingTable

# Padding in place of a token.
_NOTHING = -1


def with_jump_forward(
    token_ids: torch.Tensor, slots: RowIndices, rows: RowStates, table: SamplingTable, room: NDArray[np.int64]
) -> torch.Tensor:
    """Return a block [slots, 1 + most forced] of each row's sampled token and its forced tokens, padded with -1.

    Args:
        token_ids: [slots] int64, what they sampled and do not know yet.
        slots: the rows.
        rows: what they know.
        table: their parameters.
        room: [slots] how many tokens may be forced on each at most.
    """
    if not room.any():
        return token_ids[:, None]
    block = np.full((slots.size, 1 + int(room.max())), _NOTHING, np.int64)
    block[:, 0] = token_ids.cpu().numpy()
    if table.grammars is not None:
        for index in np.flatnonzero(room):
            # A row with log probabilities does not jump: those of its tokens come from logits.
            if table.needs[slots[index]] & (Needs.GRAMMAR | Needs.LOGPROBS) == Needs.GRAMMAR:
                forced = table.grammars.forced(int(slots[index]), int(block[index, 0]), int(room[index]), rows)
                block[index, 1 : 1 + len(forced)] = forced
    return torch.from_numpy(block).to(token_ids.device)


def empty_token_block(slots: RowIndices, room: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return an array of the shape of `with_jump_forward`'s, for another rank's to come in."""
    return torch.empty(slots.size, 1 + int(room.max()), dtype=torch.int64, device=device)


def split_token_block(block: torch.Tensor, slots: RowIndices) -> tuple[TokenIds, ForcedTokens]:
    """Return the sampled tokens of rows `slots`, [slots] int32, and their forced tokens."""
    values = block.cpu().numpy().astype(np.int32)
    forced = values[:, 1:]
    which, _ = there = np.nonzero(forced != _NOTHING)
    return values[:, 0], ForcedTokens(slots[which], forced[there]) if which.size else NOTHING_FORCED
