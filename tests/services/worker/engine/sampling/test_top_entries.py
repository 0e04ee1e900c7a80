from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sampling.drawing import BLOCK, pad_to_blocks, sort_descending, top_entries


@given(st.integers(0, 2**32), st.sampled_from([1, 4, 40, 100]), st.integers(1, 64), st.booleans())
def test_top_entries_are_the_largest(seed: int, blocks: int, count: int, has_ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, blocks * BLOCK, generator=generator)
    if has_ties:
        values = values.round()
    top, indices = top_entries(values, count)
    assert torch.equal(top, values.sort(descending=True).values[:, :count])
    assert torch.equal(values.gather(1, indices), top)
    assert all(len(set(row)) == count for row in indices.tolist())


@pytest.mark.parametrize("entries", [1, 63, 64, 65, 1000])
def test_padding_fills_the_last_block(entries: int) -> None:
    padded = pad_to_blocks(torch.ones(2, entries), -1.0)
    assert padded.shape[1] % BLOCK == 0
    assert padded.shape[1] - entries < BLOCK
    assert padded[:, :entries].eq(1).all()
    assert padded[:, entries:].eq(-1).all()


def test_sort_descending_sorts_and_leaves_its_input() -> None:
    values = torch.randn(2, 100)
    before = values.clone()
    assert torch.equal(sort_descending(values), values.sort(descending=True).values)
    assert torch.equal(values, before)
