"""A mixture of experts one expert after the other, over any kernels' products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.kernels.interface import ExpertMatrices, Kernels
    from services.worker.engine.model.config import Activation


class ExpertLoop:
    """Tokens are grouped by expert, so that each expert's weights are read once; see `Experts`.

    Experts come in the order of their numbers, whoever else is in the batch: a token's sum is the same to the last bit.
    """

    def __init__(
        self, kernels: Kernels, count: int, matrices: Iterator[ExpertMatrices], activation: Activation
    ) -> None:
        """Lay out `count` experts with `kernels`."""
        self._experts = [
            (kernels.gated_linear(each.gate, each.up, None, activation), kernels.linear(each.down, None))
            for each in matrices
        ]
        assert len(self._experts) == count, "there are as many matrices as experts"

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum; on a GPU it waits for `expert_ids`."""
        outputs = torch.zeros_like(inputs)
        chosen = expert_ids.shape[1]
        expert_of, order = expert_ids.flatten().sort(stable=True)
        tokens, weights = order // chosen, shares.flatten()[order, None]
        counts = torch.bincount(expert_of, minlength=len(self._experts)).tolist()
        start = 0
        for (gate_up, down), count in zip(self._experts, counts, strict=True):
            if count:
                part = slice(start, start + count)
                outputs.index_add_(0, tokens[part], down(gate_up(inputs[tokens[part]])) * weights[part])
                start += count
        return outputs
