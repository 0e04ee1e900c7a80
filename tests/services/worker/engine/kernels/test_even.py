"""Functions of elements do not depend on where the elements lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import gelu, silu

from services.worker.engine.kernels.even import evenly

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.log1p, silu, gelu])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_element_gets_the_same_bits_everywhere(
    function: Callable[[torch.Tensor], torch.Tensor], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.rand(40_001, generator=torch.Generator().manual_seed(0)) * 9
        whole = evenly(function, values)
        torch.testing.assert_close(whole, function(values))
        for first, last in ((0, 1), (0, 7), (16_380, 16_399), (3, 40_001), (20_000, 40_000)):
            assert torch.equal(evenly(function, values[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(before)


def test_shapes_and_views_are_kept() -> None:
    halves = torch.linspace(-3, 3, 60).view(5, 12)
    gates = halves.chunk(2, dim=1)[0]
    assert torch.equal(evenly(torch.sigmoid, gates), evenly(torch.sigmoid, halves)[:, :6])
    assert evenly(torch.sigmoid, halves[:0]).shape == (0, 12)
