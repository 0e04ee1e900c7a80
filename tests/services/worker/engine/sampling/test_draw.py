from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sampling.drawing import BLOCK, draw

LARGEST = 1 - 2.0**-24


def weights_with_gaps(seed: int, blocks: int, share: float) -> torch.Tensor:
    """Weights of which only a share is not 0, at least one of them."""
    random = np.random.default_rng(seed)
    entries = blocks * BLOCK
    weights = random.exponential(size=entries) * (random.random(entries) < share)
    weights[random.integers(entries)] = 1.0
    return torch.from_numpy(weights.astype(np.float32))[None]


@given(st.integers(0, 2**32), st.integers(1, 50), st.floats(0, 1), st.floats(0, LARGEST, width=32))
def test_the_drawn_entry_is_where_the_cumulative_weight_passes_the_number(
    seed: int, blocks: int, share: float, uniform: float
) -> None:
    weights = weights_with_gaps(seed, blocks, share)
    index = int(draw(weights, torch.tensor([uniform]))[0])
    exact = weights[0].double().numpy()
    mass = np.cumsum(exact) / exact.sum()
    assert exact[index] > 0
    assert uniform <= mass[index] + 1e-5
    assert uniform >= mass[index] - exact[index] / exact.sum() - 1e-5


@given(st.integers(0, 2**32), st.integers(1, 50), st.sampled_from([0.0, 0.001, 0.1]))
def test_the_ends_of_the_interval_draw_the_first_and_the_last_entry_with_weight(
    seed: int, blocks: int, share: float
) -> None:
    # Equal weights, so that the last one is larger than any rounding.
    weights = (weights_with_gaps(seed, blocks, share) > 0).float()
    present = weights[0].nonzero()[:, 0]
    ends = draw(weights.repeat(2, 1), torch.tensor([0.0, LARGEST]))
    assert ends.tolist() == [int(present[0]), int(present[-1])]


def test_weights_that_are_no_numbers_still_draw_an_entry_that_exists() -> None:
    index = draw(torch.full((1, 2 * BLOCK), torch.nan), torch.tensor([0.9]))
    assert 0 <= int(index[0]) < 2 * BLOCK
