"""The second half of a layer: a dense feed-forward network, or a mixture of experts (MoE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from services.worker.engine.kernels.even import evenly
from services.worker.engine.kernels.interface import PrecedesProduct
from services.worker.engine.model.config import RouterScores

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.kernels.interface import Experts, GatedLinear, Linear
    from services.worker.engine.model.config import ExpertGroups, MoeConfig
    from services.worker.engine.parallel.shards import Span

_TINY = 1e-20


class FeedForward(Protocol):
    """Feed-forward layer of this rank, which gives partial sums when ranks share the model."""

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output for inputs [tokens, hidden], of the same shape, in `outputs` if given."""
        ...

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add that to `sums` [tokens, hidden] in place."""
        ...

    def adds_within(self, tokens: int) -> bool:
        """Whether `add_to` of so many tokens adds where it multiplies, and not after that."""
        ...


class DenseFeedForward:
    """down(activation(gate) * up)."""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        """Join the two products."""
        self.gate_up = gate_up.preceding(down) if isinstance(gate_up, PrecedesProduct) else gate_up
        self.down = down

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.gate_up(inputs), outputs)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        self.down.add_to(self.gate_up(inputs), sums)

    def adds_within(self, tokens: int) -> bool:
        return self.down.adds_within(tokens)


class Router:
    """Chooses the experts of each token and weighs them (Shazeer et al. 2017; DeepSeek-AI 2024)."""

    def __init__(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        moe: MoeConfig,
        correction: torch.Tensor | None = None,
        expert_scales: torch.Tensor | None = None,
    ) -> None:
        """Choose by the logits that `product` returns for inputs, [tokens, experts].

        `correction` [experts] float32 is added to scores to choose, but not to weigh. `expert_scales` [experts] float32
        multiply the weights.
        """
        self._product = product
        self._moe = moe
        self._correction = correction
        self._expert_scales = expert_scales

    @property
    def weights_inputs(self) -> bool:
        """Whether weights multiply inputs of experts instead of their outputs."""
        return self._moe.weights_inputs

    def __call__(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids of the experts of inputs [tokens, hidden], and their weights as float32, [tokens, chosen]."""
        moe, logits = self._moe, self._product(inputs).float()
        scores = evenly(torch.sigmoid, logits) if moe.scores is RouterScores.SIGMOID else logits.softmax(dim=-1)
        preferences = scores if self._correction is None else scores + self._correction
        if moe.groups is not None and moe.groups.chosen < moe.groups.count:
            preferences = _in_best_groups(preferences, moe.groups)
        weights, ids = preferences.topk(moe.experts_per_token)
        if preferences is not scores:
            weights = scores.gather(1, ids)
        if moe.normalizes_routing_weights:
            # Sigmoids may all be zero.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        if self._expert_scales is not None:
            weights = weights * self._expert_scales[ids]
        return ids, weights if moe.routing_scale == 1.0 else weights * moe.routing_scale


class SharedFeedForward:
    """The feed-forward layer of all tokens beside experts; `gate` [hidden, 1] or None, see `SharedExperts`."""

    def __init__(self, layer: FeedForward, gate: Linear | None) -> None:
        """Scale the output of `layer` by that of `gate`."""
        self._layer = layer
        self._gate = gate

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output for inputs [tokens, hidden]."""
        outputs = self._layer(inputs)
        return outputs if self._gate is None else outputs * evenly(torch.sigmoid, self._gate(inputs))


class DividedExperts:
    """Whole experts of which every rank holds some; see `Experts`. It gives this rank's part of the sum."""

    def __init__(self, experts: Experts, held: Span, counts: torch.Tensor) -> None:
        """Choose among `experts`, which are those in `held`; choices are added to `counts` [all experts] int64."""
        self._experts = experts
        self._held = held
        self._counts = counts

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of those of the chosen experts that this rank holds."""
        chosen = expert_ids.flatten()
        self._counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        count, local = len(self._held), expert_ids - self._held.start
        return self._experts(inputs, local.where((local >= 0) & (local < count), count), routing_weights)


class MoeFeedForward:
    """Mixture of experts: the outputs of the experts that the router chooses, weighted, and of the shared layer.

    Every rank routes every token, and holds some columns of every expert, or some experts.
    """

    def __init__(self, router: Router, experts: Experts, shared: SharedFeedForward | None = None) -> None:
        """Add up `experts` and, where the model has it, `shared`."""
        self._router = router
        self._experts = experts
        self._shared = shared

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs."""
        expert_ids, weights = self._router(inputs)
        weights = weights.to(inputs.dtype)
        if self._router.weights_inputs:
            weighted = self._of_weighted(inputs, expert_ids, weights)
        else:
            weighted = self._experts(inputs, expert_ids, weights)
        if self._shared is not None:
            weighted += self._shared(inputs)
        return weighted if outputs is None else outputs.copy_(weighted)

    def _of_weighted(self, inputs: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs for weighted inputs: every choice is a token of its own."""
        (tokens, chosen), hidden = expert_ids.shape, inputs.shape[1]
        scaled = (inputs[:, None] * weights[:, :, None]).view(-1, hidden)
        outputs = self._experts(scaled, expert_ids.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return outputs if chosen == 1 else outputs.view(tokens, chosen, hidden).sum(dim=1)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add it to `sums`."""
        sums += self(inputs)

    def adds_within(self, tokens: int) -> bool:
        del tokens
        return False


@dataclass(frozen=True, slots=True)
class ExpertsBesideDense:
    """Experts beside a layer's ordinary feed-forward layer; both outputs are normalised before they are added.

    Router and experts take the residual stream, each through a norm of its own. Norms are [hidden].
    """

    router_norm: torch.Tensor
    router: Router
    experts_norm: torch.Tensor
    experts: Experts
    dense_output_norm: torch.Tensor
    experts_output_norm: torch.Tensor

    def of_experts(
        self, hidden: torch.Tensor, normed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return this rank's part of the experts' output for the residual stream [tokens, hidden], not normalised.

        `normed` applies a norm's weights.
        """
        expert_ids, weights = self.router(normed(hidden, self.router_norm))
        return self.experts(normed(hidden, self.experts_norm), expert_ids, weights.to(hidden.dtype))


def _in_best_groups(preferences: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Return [tokens, experts] with minus infinity for experts of other groups."""
    by_group = preferences.view(preferences.shape[0], groups.count, -1)
    _, best = by_group.topk(groups.best, dim=-1).values.sum(dim=-1).topk(groups.chosen)
    is_out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=preferences.device).scatter(1, best, False)
    return by_group.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)
