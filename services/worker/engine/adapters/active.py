"""Products of rows that each use an adapter of their own, or none: a base product, and low-rank ones added to it.

Tokens are grouped by adapter, so that each adapter's factors are read once in a pass (Sheng et al. 2023, S-LoRA).
Tokens without an adapter get the same bits, whichever other tokens are in their pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn.functional import linear

from services.worker.engine.kernels.composed import ExpertLoop
from services.worker.engine.kernels.torch.kernels import gated
from services.worker.engine.plans.rows import NO_ADAPTER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from services.worker.engine.adapters.sites import AdapterWeights, Site, SiteFactors
    from services.worker.engine.kernels.interface import Experts, GatedLinear, Linear
    from services.worker.engine.model.config import Activation


class AdapterProducts(Protocol):
    """The adapters in a rank's slots, and what they add to the products of a pass."""

    sites: list[Site]
    """The products that adapters can change."""
    most_ranks: int | None
    """The largest rank of an adapter; None: any."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    def put(self, slot: int, weights: AdapterWeights | None) -> None:
        """Fill a slot, or empty it; no row of a later pass uses what was in it."""

    def clear(self) -> None:
        """Empty all slots."""

    def use(self, slots: torch.Tensor | None) -> None:
        """Set what the following products apply to: the slot of each token, [tokens] int32, NO_ADAPTER for none."""

    def start(self, site: Site, inputs: torch.Tensor) -> AbstractContextManager[torch.Tensor | None]:
        """Begin with the adapters' products of inputs [tokens, in] beside what runs in the context.

        It gives what `add` takes; None: nothing has begun.
        """

    def add(self, site: Site, inputs: torch.Tensor, sums: torch.Tensor, started: torch.Tensor | None = None) -> None:
        """Add the adapters' products of inputs [tokens, in] to `sums` [tokens, out] in place.

        `started` is what `start` gave for the same inputs.
        """

    def gate(self, product: GatedLinear, site: Site, activation: Activation, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product [tokens, intermediate] with what adapters add to its halves."""

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings [tokens, hidden] of `token_ids` with what adapters add to them."""

    def experts(self, loop: Experts, sites: Sequence[tuple[Site, Site]], activation: Activation) -> Experts:
        """Return experts that adapters change, each at its sites: gate and up, and down; or `loop` if none can."""


class TokenGroup(NamedTuple):
    """The tokens of a pass that use one adapter; `tokens` [n] int64, ascending."""

    weights: AdapterWeights
    tokens: torch.Tensor


class GroupedAdapters:
    """Adapters whose products are computed for one after the other; see `AdapterProducts`. On a GPU it waits for it."""

    def __init__(self, slots: int) -> None:
        """Start with `slots` empty slots."""
        self.sites: list[Site] = []
        self.most_ranks: int | None = None
        self._slots: list[AdapterWeights | None] = [None] * slots
        self._groups: Sequence[TokenGroup] = ()

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._slots)

    @property
    def groups(self) -> Sequence[TokenGroup]:
        """The tokens that use adapters."""
        return self._groups

    def put(self, slot: int, weights: AdapterWeights | None) -> None:
        """Fill a slot, or empty it; no pass runs meanwhile."""
        self._slots[slot] = weights

    def clear(self) -> None:
        """Empty all slots."""
        self._slots = [None] * len(self._slots)
        self._groups = ()

    def use(self, slots: torch.Tensor | None) -> None:
        """Set what the following products apply to: the slot of each token, [tokens] int32, NO_ADAPTER for none."""
        if slots is None:
            self._groups = ()
            return
        groups = []
        for slot in torch.unique(slots).tolist():
            if slot == NO_ADAPTER:
                continue
            weights = self._slots[slot]
            assert weights is not None, f"plans load adapters before rows use them; slot {slot} is empty"
            groups.append(TokenGroup(weights, torch.nonzero(slots == slot)[:, 0]))
        self._groups = groups

    def change(self, site: Site) -> Sequence[tuple[SiteFactors, torch.Tensor]]:
        """Return the factors of each adapter that changes a site, with its tokens."""
        return [
            (factors, group.tokens)
            for group in self._groups
            if (factors := group.weights.sites.get(site.name)) is not None
        ]

    def start(self, _site: Site, _inputs: torch.Tensor) -> AbstractContextManager[None]:
        """Begin with nothing."""
        return nullcontext()

    def add(self, site: Site, inputs: torch.Tensor, sums: torch.Tensor, _started: torch.Tensor | None = None) -> None:
        """Add the adapters' products of inputs [tokens, in] to `sums` [tokens, out] in place."""
        for factors, tokens in self.change(site):
            add_product(factors, inputs[tokens], sums, tokens)

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings [tokens, hidden] of `token_ids` with what adapters add to them."""
        changed = rows
        for weights, tokens in self._groups:
            if weights.embedding is None:
                continue
            if changed is rows:
                changed = rows.clone()
            low = weights.embedding.a[token_ids[tokens]]
            changed.index_add_(0, tokens, linear(low, weights.embedding.b).to(rows.dtype))
        return changed

    def gate(self, product: GatedLinear, site: Site, activation: Activation, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; that of tokens with adapters is computed from separate halves."""
        changes = self.change(site)
        if not changes:
            return product(inputs)
        outputs = product(inputs) if sum(len(tokens) for _, tokens in changes) < len(inputs) else None
        for factors, tokens in changes:
            part = adapted_gate(product, activation, factors, inputs[tokens])
            if outputs is None:
                outputs = part.new_empty(len(inputs), part.shape[1])
            outputs[tokens] = part
        assert outputs is not None, "there is a change"
        return outputs

    def experts(self, loop: Experts, sites: Sequence[tuple[Site, Site]], activation: Activation) -> Experts:
        """Return experts that adapters change, each at its sites: gate and up, and down; or `loop` if none can."""
        if not isinstance(loop, ExpertLoop):
            return loop
        for pair in sites:
            self.sites.extend(pair)
        return AdaptedExperts(loop, sites, activation, self)


def add_product(
    factors: SiteFactors, inputs: torch.Tensor, sums: torch.Tensor, tokens: torch.Tensor | None = None
) -> None:
    """Add an adapter's product of inputs [n, in] to rows `tokens` [n] of `sums` [tokens, out], or to all of them."""
    low = linear(inputs.to(factors.a.dtype), factors.a)
    for part in factors.parts:
        added = linear(low[:, part.ranks], part.b).to(sums.dtype)
        place = sums[:, part.first : part.first + part.b.shape[0]]
        if tokens is None:
            place += added
        else:
            place.index_add_(0, tokens, added)


class AdaptedLinear:
    """A matrix product with what adapters add to it; see `Linear`."""

    def __init__(self, product: Linear, site: Site, adapters: AdapterProducts) -> None:
        """Add the products of `adapters` at `site` to `product`."""
        adapters.sites.append(site)
        self.product = product
        self._site = site
        self._adapters = adapters

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        with self._adapters.start(self._site, inputs) as started:
            product = self.product(inputs, outputs)
        self._adapters.add(self._site, inputs, product, started)
        return product

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        with self._adapters.start(self._site, inputs) as started:
            self.product.add_to(inputs, sums)
        self._adapters.add(self._site, inputs, sums, started)

    def adds_within(self, tokens: int) -> bool:
        return self.product.adds_within(tokens)


class AdaptedGatedLinear:
    """Gate and up product with what adapters add before the activation; see `GatedLinear`."""

    def __init__(self, product: GatedLinear, site: Site, activation: Activation, adapters: AdapterProducts) -> None:
        """Add the products of `adapters` at `site`, gate above up, to `product`'s."""
        adapters.sites.append(site)
        self.product = product
        self._site = site
        self._activation = activation
        self._adapters = adapters

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._adapters.gate(self.product, self._site, self._activation, inputs)

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the base product of both halves; see `GatedLinear.halves`."""
        return self.product.halves(inputs)


def adapted_gate(
    product: GatedLinear, activation: Activation, factors: SiteFactors, inputs: torch.Tensor
) -> torch.Tensor:
    """Return the gated product of inputs [tokens, in] that all use one adapter."""
    both = product.halves(inputs)
    add_product(factors, inputs, both)
    gate, up = both.chunk(2, dim=-1)
    return gated(gate, up, activation)


class AdaptedExperts:
    """Experts with what adapters add to each of their matrices; see `Experts`."""

    def __init__(
        self, loop: ExpertLoop, sites: Sequence[tuple[Site, Site]], activation: Activation, adapters: GroupedAdapters
    ) -> None:
        """Add the products of `adapters` to expert i at sites[i]."""
        self._loop = loop
        self._sites = sites
        self._activation = activation
        self._adapters = adapters
        self._names = frozenset(site.name for pair in sites for site in pair)

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum; tokens without adapters of experts are computed as if there were no others."""
        groups = [group for group in self._adapters.groups if self._names & group.weights.sites.keys()]
        if not groups:
            return self._loop(inputs, expert_ids, routing_weights)
        outputs = torch.zeros_like(inputs)
        is_changed = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        for group in groups:
            is_changed[group.tokens] = True
        rest = torch.nonzero(~is_changed)[:, 0]
        if len(rest):
            outputs[rest] = self._loop(inputs[rest], expert_ids[rest], routing_weights[rest])
        for weights, tokens in groups:
            outputs[tokens] = self._adapted(weights, inputs[tokens], expert_ids[tokens], routing_weights[tokens])
        return outputs

    def _adapted(
        self, weights: AdapterWeights, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        outputs = torch.zeros_like(inputs)
        for expert in torch.unique(expert_ids).tolist():
            tokens, choice = torch.nonzero(expert_ids == expert, as_tuple=True)
            own, (gate_up, down) = inputs[tokens], self._loop.experts[expert]
            first, second = (weights.sites.get(site.name) for site in self._sites[expert])
            inner = gate_up(own) if first is None else adapted_gate(gate_up, self._activation, first, own)
            result = down(inner)
            if second is not None:
                add_product(second, inner, result)
            outputs.index_add_(0, tokens, result * routing_weights[tokens, choice, None])
        return outputs
