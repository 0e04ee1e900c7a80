"""Log probabilities of sampled tokens and of prompt tokens, of the logits before any logits processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from common.prompt_logprobs import PromptLogprobSpan
from common.types import RowSlot, TokenLogprob
from services.worker.engine.sampling.drawing import pad_to_blocks, top_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from services.worker.engine.plans.rows import RowIndices
    from services.worker.engine.plans.scoring import RowSpans, Scored


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


# Bytes of one slice's logits in float32; a few copies of them exist at a time.
SLICE_BYTES = 32 * 1024 * 1024


def score(
    hidden: torch.Tensor,
    scored: Sequence[Scored],
    vocabulary_size: int,
    logits_of: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    *,
    is_first: bool,
    adapters: torch.Tensor | None = None,
) -> RowSpans:
    """Return the log probabilities of each run, at temperature 1, of the logits as the model gives them.

    Args:
        hidden: [tokens, hidden], of all runs in order.
        scored: the runs.
        vocabulary_size: entries of a row of logits.
        logits_of: from hidden states [n, hidden] and `adapters` [n] to logits [n, vocabulary]; all ranks make the same
            calls.
        is_first: whether this rank gets the logits; the others return nothing.
        adapters: [tokens] int32, see `ForwardBatch.adapters`.
    """
    size = max(SLICE_BYTES // (4 * vocabulary_size), 1)
    spans = []
    start = 0
    for run in scored:
        parts = []
        for first in range(0, run.targets.size, size):
            targets = run.targets[first : first + size]
            part = slice(start + first, start + first + targets.size)
            logits = logits_of(hidden[part], None if adapters is None else adapters[part])
            if is_first:
                parts.append(_score_slice(logits.float(), targets, run))
        start += run.targets.size
        if is_first:
            columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
            spans.append((run.row, PromptLogprobSpan(run.first, run.targets, *columns)))
    return tuple(spans)


def _score_slice(logits: torch.Tensor, targets: np.ndarray, run: Scored) -> tuple[np.ndarray, ...]:
    """Return log probabilities, ranks, top ids, their log probabilities, and those of the requested ids."""
    # Not logsumexp: threads share the sum of a single row, and its last bits then differ from those among more rows.
    # On a GPU the order of a sum depends on where its row begins, if rows are not whole blocks.
    is_even = logits.device.type == "cpu"
    distribution = torch.log_softmax(logits if is_even else pad_to_blocks(logits, -torch.inf), dim=-1)
    own = torch.from_numpy(targets.astype(np.int64)).to(logits.device)[:, None]
    ranks = (logits > logits.gather(1, own)).sum(dim=-1) + 1
    asked = distribution[:, torch.tensor(run.wanted.token_ids, dtype=torch.int64, device=logits.device)]
    top = min(run.wanted.top, logits.shape[1])
    if top:
        values, ids = top_entries(pad_to_blocks(distribution, -torch.inf), top)
    else:
        values, ids = distribution[:, :0], torch.empty(logits.shape[0], 0, dtype=torch.int64)
    return (
        distribution.gather(1, own)[:, 0].cpu().numpy(),
        ranks.cpu().numpy().astype(np.int32),
        ids.cpu().numpy().astype(np.int32),
        values.cpu().numpy(),
        asked.cpu().numpy(),
    )
