"""The output of one forward pass, before rows and results take it in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from common.steps import RowStop
from common.types import FinishReason, RowSlot
from services.worker.engine.plans.rows import NOTHING_FOLLOWS, FollowingTokens, concatenate_following

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.steps import StepResult
    from common.types import TokenIds, TokenLogprob
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowIndices
    from services.worker.engine.plans.scoring import RowSpans

NO_TOKENS: TokenIds = np.empty(0, np.int32)
NO_ROWS: RowIndices = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class PassOutput:
    """One token for each of a pass's `sampled_rows`, [rows] int32, and the requested log probabilities of all tokens.

    `embeddings` are those of its `pooled_rows`, as `Finish.embedding` has them. Memory did not suffice for `failed`
    rows: their tokens are undefined, and so is the data that was to be stored of them.
    """

    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()
    embeddings: tuple[tuple[RowSlot, bytes], ...] = ()
    failed: RowIndices = field(default_factory=lambda: NO_ROWS)
    # Only on the rank that has the logits.
    prompt_logprobs: RowSpans = ()
    # Tokens that were sampled after these, as the rows' drafts were right.
    accepted: FollowingTokens = NOTHING_FOLLOWS
    # Tokens that follow the last sampled one by jump-forward.
    forced: FollowingTokens = NOTHING_FOLLOWS


def failures(rows: RowIndices) -> tuple[RowStop, ...]:
    """Return the stops of rows for which memory did not suffice."""
    return tuple(RowStop(RowSlot(row), FinishReason.ERROR) for row in rows.tolist())


def with_tokens(
    result: StepResult, forward: ForwardPass, sampled: PassOutput, stops: tuple[RowStop, ...]
) -> StepResult:
    """Return the result of a pass with what its rows got, as the rank that samples reports it."""
    rows, token_ids = forward.sampled_rows, sampled.token_ids
    if sampled.failed.size:
        has_token = ~np.isin(rows, sampled.failed)
        rows, token_ids = rows[has_token], token_ids[has_token]
    return replace(
        result,
        rows=rows.astype(np.int32),
        token_ids=token_ids,
        stops=stops,
        logprobs=sampled.logprobs,
        embeddings=sampled.embeddings,
        accepted_rows=sampled.accepted.rows.astype(np.int32),
        accepted_token_ids=sampled.accepted.token_ids,
        forced_rows=sampled.forced.rows.astype(np.int32),
        forced_token_ids=sampled.forced.token_ids,
    )


def join(forward: ForwardPass, parts: Sequence[PassOutput], failed: RowIndices) -> PassOutput:
    """Return the output of a pass from the outputs of its parts, which are in the order of its samples."""
    if len(parts) == 1 and not failed.size:
        return parts[0]
    token_ids = np.zeros(forward.sampled_rows.size, np.int32)
    token_ids[~np.isin(forward.sampled_rows, failed)] = np.concatenate([NO_TOKENS, *(part.token_ids for part in parts)])
    return PassOutput(
        token_ids,
        tuple(entry for part in parts for entry in part.logprobs),
        tuple(entry for part in parts for entry in part.embeddings),
        failed,
        tuple(entry for part in parts for entry in part.prompt_logprobs),
        concatenate_following([part.accepted for part in parts]),
        concatenate_following([part.forced for part in parts]),
    )
