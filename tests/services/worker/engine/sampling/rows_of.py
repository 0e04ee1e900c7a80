"""Rows with given parameters, ready to be sampled, and the naive way to do what the sampler does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.types import SamplingParams
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.sampler import Samples, sample
from services.worker.engine.sampling.table import SamplingTable
from tests.services.worker.engine.scenario import open_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from common.steps import RowOpen


def tables(opens: Sequence[RowOpen], vocabulary: int) -> tuple[RowStates, SamplingTable]:
    count = max(opened.row for opened in opens) + 1
    context = max(len(opened.token_ids) for opened in opens) + 1
    rows, table = RowStates(count, context, page_size=16), SamplingTable(count, vocabulary)
    for opened in opens:
        rows.open(opened)
        table.open(opened)
    return rows, table


def sample_rows(logits: torch.Tensor, opens: Sequence[RowOpen]) -> Samples:
    """Sample each of `opens` with its row of `logits`, which stays as it is."""
    rows, table = tables(opens, logits.shape[1])
    return sample(logits.clone(), np.array([opened.row for opened in opens], np.int64), rows, table)


def repeated(sampling: SamplingParams, seeds: range, length: int = 3) -> list[RowOpen]:
    """The same request with many seeds."""
    return [
        open_row(i, range(length), sampling=SamplingParams(**{**_fields(sampling), "seed": seed}))  # type: ignore[arg-type]
        for i, seed in enumerate(seeds)
    ]


def _fields(sampling: SamplingParams) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}


def kept_tokens(probabilities: NDArray[np.float64], top_k: int, top_p: float, min_p: float = 0) -> set[int]:
    """The tokens that may be drawn, by definition: walk down from the most likely one."""
    order = np.argsort(-probabilities, kind="stable")[:top_k]
    total, kept, mass = probabilities[order].sum(), set(), 0.0
    for token in order:
        if mass >= top_p * total and top_p < 1:
            break
        kept.add(int(token))
        mass += probabilities[token]
    least = min_p * probabilities.max()
    return {token for token in kept if probabilities[token] >= least}


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def chi_square_is_plausible(observed: NDArray[np.int64], probabilities: NDArray[np.float64]) -> bool:
    """Whether counts fit a distribution; tokens too rare to tell are pooled."""
    expected = probabilities * observed.sum()
    common = expected >= 10
    groups = np.append(expected[common], expected[~common].sum())
    counts = np.append(observed[common], observed[~common].sum())
    groups, counts = groups[groups > 0], counts[groups > 0]
    statistic = ((counts - groups) ** 2 / groups).sum()
    freedom = len(groups) - 1
    # Five standard deviations above the mean of the distribution.
    return bool(statistic <= freedom + 5 * np.sqrt(2 * freedom))
