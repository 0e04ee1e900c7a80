"""Log probabilities of what was sampled, from the logits as the model gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.types import RowSlot, TokenLogprob
from services.worker.engine.sampling.order import pad_to_blocks, top_entries

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from services.worker.engine.plans.rows import RowIndices


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    slots: RowIndices,
    top: NDArray[np.int64],
    asked: Sequence[tuple[int, ...]] = (),
) -> tuple[tuple[RowSlot, TokenLogprob], ...]:
    """Return natural-log probabilities at temperature 1, one entry for each row.

    Args:
        logits: [rows, vocabulary] float32, unmodified.
        token_ids: [rows] int64, what was sampled.
        slots: [rows], the rows' slots.
        top: [rows], how many of the most likely tokens each wants.
        asked: the ids whose log probabilities each wants, too; none of any row if it is left out.
    """
    distribution = torch.log_softmax(logits, dim=-1)
    sampled = distribution.gather(1, token_ids[:, None])[:, 0].tolist()
    wanted = min(int(top.max()), logits.shape[1])
    if any(asked):
        named = [tuple(distribution[i, list(ids)].tolist()) for i, ids in enumerate(asked)]
    else:
        named = [()] * slots.size
    if wanted == 0:
        return tuple((RowSlot(int(slots[i])), TokenLogprob(sampled[i], asked=named[i])) for i in range(slots.size))
    values, ids = (best.tolist() for best in top_entries(pad_to_blocks(distribution, -torch.inf), wanted))
    return tuple(
        (
            RowSlot(int(slots[i])),
            TokenLogprob(sampled[i], tuple(ids[i][: top[i]]), tuple(values[i][: top[i]]), named[i]),
        )
        for i in range(slots.size)
    )
