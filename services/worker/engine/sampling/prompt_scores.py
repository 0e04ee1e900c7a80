"""Log probabilities of prompt tokens. A prompt has thousands of positions, so their logits are made in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from common.prompt_logprobs import PromptLogprobSpan
from services.worker.engine.sampling.order import pad_to_blocks, top_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.plans.scoring import RowSpans, Scored

# Of the logits of one slice in float32; there are a few copies of them at a time.
SLICE_BYTES = 32 * 1024 * 1024


def score(
    hidden: torch.Tensor,
    scored: Sequence[Scored],
    vocabulary_size: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_first: bool,
) -> RowSpans:
    """Return the log probabilities of each run, at temperature 1, of the logits as the model gives them.

    Args:
        hidden: [tokens, hidden], of all runs in order.
        scored: the runs.
        vocabulary_size: entries of a row of logits.
        logits_of: from hidden states [n, hidden] to logits [n, vocabulary]; all ranks make the same calls.
        is_first: whether this rank gets the logits; the others return nothing.
    """
    size = max(SLICE_BYTES // (4 * vocabulary_size), 1)
    spans = []
    start = 0
    for run in scored:
        parts = []
        for first in range(0, run.targets.size, size):
            targets = run.targets[first : first + size]
            logits = logits_of(hidden[start + first : start + first + targets.size])
            if is_first:
                parts.append(_score_slice(logits.float(), targets, run))
        start += run.targets.size
        if is_first:
            columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
            spans.append((run.row, PromptLogprobSpan(run.first, run.targets, *columns)))
    return tuple(spans)


def _score_slice(logits: torch.Tensor, targets: np.ndarray, run: Scored) -> tuple[np.ndarray, ...]:
    """Return log probabilities, ranks, top ids, their log probabilities, and those of the ids asked for."""
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    own = logits.gather(1, torch.from_numpy(targets.astype(np.int64)).to(logits.device)[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    asked = logits[:, torch.tensor(run.wanted.token_ids, dtype=torch.int64, device=logits.device)] - normalizer
    top = min(run.wanted.top, logits.shape[1])
    if top:
        values, ids = top_entries(pad_to_blocks(logits, -torch.inf), top)
    else:
        values, ids = logits[:, :0], torch.empty(logits.shape[0], 0, dtype=torch.int64)
    return (
        (own - normalizer)[:, 0].cpu().numpy(),
        ranks.cpu().numpy().astype(np.int32),
        ids.cpu().numpy().astype(np.int32),
        (values - normalizer).cpu().numpy(),
        asked.cpu().numpy(),
    )
