from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sampling.drawing import order_thresholds, pad_to_blocks
from services.worker.engine.sampling.table import KEEP_ALL
from tests.services.worker.engine.sampling.rows_of import kept_tokens, softmax

# Below, between and above the numbers of entries that the search looks at.
VOCABULARIES = [10, 300, 1000, 5000, 20_000]
SLACK = 1e-5


@given(
    st.integers(0, 2**32),
    st.sampled_from(VOCABULARIES),
    st.floats(0.1, 8),
    st.lists(
        st.tuples(st.just(KEEP_ALL) | st.integers(1, 3000), st.just(1.0) | st.floats(0.01, 0.999)),
        min_size=1,
        max_size=5,
    ),
)
def test_kept_tokens_are_those_of_the_definition(
    seed: int, vocabulary: int, spread: float, filters: list[tuple[int, float]]
) -> None:
    random = np.random.default_rng(seed)
    exact = np.stack([softmax(random.normal(size=vocabulary) * spread) for _ in filters])
    probabilities = pad_to_blocks(torch.from_numpy(exact.astype(np.float32)), 0.0)
    top_k = torch.tensor([k for k, _ in filters])
    top_p = torch.tensor([p for _, p in filters], dtype=torch.float32)
    thresholds = order_thresholds(probabilities, top_k, top_p)
    for row, (k, p) in enumerate(filters):
        kept = set(np.flatnonzero(probabilities[row].numpy() >= thresholds[row].item()).tolist()) - {
            *range(vocabulary, probabilities.shape[1])
        }
        # Rounding may move the border by a token whose share of the mass is below the slack.
        fewest = kept_tokens(exact[row], k, p * (1 - SLACK))
        most = kept_tokens(exact[row], k, p if p == 1 else p * (1 + SLACK))
        assert fewest <= kept <= most


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_of_equal_probability_are_kept_or_dropped_together(vocabulary: int) -> None:
    flat = pad_to_blocks(torch.full((2, vocabulary), 1 / vocabulary), 0.0)
    thresholds = order_thresholds(flat, torch.tensor([1, KEEP_ALL]), torch.tensor([1.0, 0.5]))
    assert (flat[:, :vocabulary] >= thresholds[:, None]).all()


def test_filter_thresholds_of_a_row_do_not_depend_on_other_rows() -> None:
    random = np.random.default_rng(5)
    exact = np.stack([softmax(random.normal(size=20_000) * spread) for spread in (6, 0.1, 2, 1)])
    probabilities = pad_to_blocks(torch.from_numpy(exact.astype(np.float32)), 0.0)
    top_k = torch.tensor([KEEP_ALL, 2000, 20, KEEP_ALL])
    top_p = torch.tensor([0.9, 0.5, 1.0, 0.999])
    together = order_thresholds(probabilities, top_k, top_p)
    alone = [order_thresholds(probabilities[i : i + 1], top_k[i : i + 1], top_p[i : i + 1]) for i in range(4)]
    assert torch.equal(together, torch.cat(alone))
