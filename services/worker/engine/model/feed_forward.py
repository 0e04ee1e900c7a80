"""The second half of a layer: a dense feed-forward network, or a mixture of experts (MoE)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import Experts, GatedLinear, Linear
    from services.worker.engine.model.config import MoeConfig


class FeedForward(Protocol):
    """Feed-forward layer of this rank, which gives partial sums when ranks share the model."""

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output for inputs [tokens, hidden], of the same shape, in `outputs` if given."""
        ...

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add that to `sums` [tokens, hidden] in place."""
        ...


class DenseFeedForward:
    """down(activation(gate) * up)."""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        """Join the two products."""
        self.gate_up = gate_up
        self.down = down

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.gate_up(inputs), outputs)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        self.down.add_to(self.gate_up(inputs), sums)


class MoeFeedForward:
    """Mixture of experts: the top-k experts of each token, weighted by the router's softmax (Shazeer et al. 2017).

    Every rank routes every token, and holds some columns of every expert.
    """

    def __init__(self, router: Linear, experts: Experts, moe: MoeConfig) -> None:
        """Choose among `experts` by the logits of `router`, [tokens, experts]."""
        self._router = router
        self._experts = experts
        self._moe = moe

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs."""
        logits = self._router(inputs)
        routing_weights, expert_ids = torch.topk(torch.softmax(logits.float(), dim=-1), self._moe.experts_per_token)
        if self._moe.normalizes_routing_weights:
            routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        weighted = self._experts(inputs, expert_ids, routing_weights.to(logits.dtype))
        return weighted if outputs is None else outputs.copy_(weighted)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add it to `sums`."""
        sums += self(inputs)
