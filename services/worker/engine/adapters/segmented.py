"""Products of rows that each use an adapter of their own, or none, by programs that CUDA graphs can contain."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from services.worker.engine.adapters.sites import EMBEDDING
from services.worker.engine.kernels.gpu import adapter_products as programs
from services.worker.engine.kernels.gpu.experts import GpuExperts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from services.worker.engine.adapters.sites import AdapterWeights, Site
    from services.worker.engine.kernels.interface import Experts, GatedLinear
    from services.worker.engine.model.config import Activation

# Of one adapter in one matrix: buffers of CUDA graphs have room for them.
MOST_RANKS: Final = 512
# Of buffers outside of CUDA graphs, as long as adapters have no more.
_FEW_RANKS: Final = 16
# Up to so many tokens in so many tiles, inputs are shrunk on a stream of their own beside the base product. On an H200,
# products of 8 adapters take 26 to 28 us of a layer so, instead of 40 to 43, at 16 and 64 tokens, and 41 to 46 instead
# of 40 at 256; 32 of 64 adapters 53 instead of 56. The many programs of 64 tokens of as many adapters get in the way of
# the base product: 80 us beside it, 78 after it.
_BESIDE_TOKENS: Final = 64
_BESIDE_TILES: Final = 40


class SegmentedAdapters:
    """Adapters that a table on the device names; see `AdapterProducts`.

    A pass that was captured as a CUDA graph serves whatever adapters are in the slots when it is replayed.
    """

    def __init__(self, slots: int, device: torch.device, *, changes_experts: bool = False) -> None:
        """Start with `slots` empty slots on `device`.

        With `changes_experts`, adapters may change experts, and captured passes compute these for adapters always.
        """
        self._changes_experts = changes_experts
        self.sites: list[Site] = []
        self.most_ranks: int | None = MOST_RANKS
        self._device = device
        # What the table's addresses point to, by slot.
        self._held: list[tuple[torch.Tensor, ...]] = [()] * slots
        self._table: torch.Tensor | None = None  # [sites and embedding, 1 + slots, columns] int64
        self._index: dict[str, int] = {}
        # Ranks in the table's lines, and the most of each of its products.
        self._ranks: NDArray[np.int64] = np.zeros((0, slots), np.int64)
        self._most: list[int] = []
        self._has_factors = False
        self._tiles: programs.TokenTiles | None = None
        # Of the tokens that products apply to; None: none has an adapter.
        self._slots_in_use: torch.Tensor | None = None
        self._side: torch.cuda.Stream | None = None

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._held)

    def put(self, slot: int, weights: AdapterWeights | None) -> None:
        """Fill a slot, or empty it, after all passes that were launched."""
        table = self._whole_table()
        columns = table.shape[2]
        lines = [[0] * columns for _ in self._index]
        held: list[torch.Tensor] = []
        for name, a, parts in () if weights is None else _laid_out(weights):
            lines[self._index[name]] = programs.table_line(a, parts, columns)
            held += [a, *(part.b for part in parts)]
        written = torch.tensor(lines, dtype=torch.int64)
        table[:, 1 + slot].copy_(written)
        self._ranks[:, slot] = written[:, 1].numpy()
        self._most = self._ranks.max(1).tolist()
        self._has_factors = any(self._most)
        self._held[slot] = tuple(held)

    def clear(self) -> None:
        """Empty all slots."""
        if self._table is not None:
            self._table.zero_()
        self._ranks[:] = 0
        self._most = [0] * len(self._most)
        self._has_factors = False
        self._held = [()] * self.slots
        self._tiles = self._slots_in_use = None

    def use(self, slots: torch.Tensor | None) -> None:
        """Set what the following products apply to; see `AdapterProducts.use`."""
        if slots is None or not slots.shape[0]:
            self._tiles = self._slots_in_use = None
            return
        self._whole_table()
        self._slots_in_use = slots
        self._tiles = programs.TokenTiles.of(slots, self.slots)

    def start(self, site: Site, inputs: torch.Tensor) -> AbstractContextManager[torch.Tensor | None]:
        """Begin with the adapters' products of inputs [tokens, in] beside what runs in the context."""
        if self._tiles is None or not self._may_change(self._place_of(site.name)):
            return nullcontext()
        if len(self._tiles.order) > _BESIDE_TOKENS or len(self._tiles.tiles) > _BESIDE_TILES:
            return nullcontext()
        if self._device.type != "cuda":  # where programs are interpreted
            return nullcontext()
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        parts = len(site.parts)
        return programs.ShrinkingBeside(
            self._side,
            self._tiles,
            self._lines(site.name),
            parts,
            self._most_ranks(self._place_of(site.name), parts),
            inputs,
        )

    def add(self, site: Site, inputs: torch.Tensor, sums: torch.Tensor, started: torch.Tensor | None = None) -> None:
        """Add the adapters' products of inputs [tokens, in] to `sums` [tokens, out] in place."""
        if self._tiles is not None and self._may_change(self._place_of(site.name)):
            shrunk = self._shrunk(site, inputs) if started is None else started
            lines, parts = self._lines(site.name), len(site.parts)
            programs.add_products(self._tiles, lines, parts, shrunk, sums, is_joined=started is not None)

    def gate(self, product: GatedLinear, site: Site, activation: Activation, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product, from separate halves where any token has an adapter."""
        if self._tiles is None or not self._may_change(self._place_of(site.name)):
            return product(inputs)
        with self.start(site, inputs) as started:
            both = product.halves(inputs)
        shrunk = self._shrunk(site, inputs) if started is None else started
        lines, parts = self._lines(site.name), len(site.parts)
        return programs.gated_products(
            self._tiles, lines, parts, shrunk, both, activation, is_joined=started is not None
        )

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings [tokens, hidden] of `token_ids` with what adapters add to them."""
        if self._tiles is None or not self._may_change(self._place_of(EMBEDDING)):
            return rows
        changed, ranks = rows.clone(), self._most_ranks(self._place_of(EMBEDDING), 1)
        programs.add_embeddings(self._tiles, self._lines(EMBEDDING), ranks, token_ids, changed)
        return changed

    def experts(self, loop: Experts, sites: Sequence[tuple[Site, Site]], activation: Activation) -> Experts:
        """Return experts that adapters change, each at its sites: gate and up, and down; or `loop` if none can."""
        if not (self._changes_experts and isinstance(loop, GpuExperts)):
            return loop
        gate_ups, downs = zip(*sites, strict=True)
        # The lines of a layer's experts are adjacent in the table.
        self.sites += [*gate_ups, *downs]
        return SegmentedExperts(loop, ExpertProduct(self, gate_ups), ExpertProduct(self, downs), activation, self)

    def tiles_of(self, expert_ids: torch.Tensor, products: Sequence[ExpertProduct]) -> programs.TokenTiles | None:
        """Return the pairs of tokens and chosen experts [tokens, chosen] in tiles; None: no adapter changes any."""
        if self._slots_in_use is None or not any(self._may_change(self._places_of(each)) for each in products):
            return None
        return programs.TokenTiles.of_pairs(self._slots_in_use, expert_ids, 1 + self.slots)

    def lines_of(self, product: ExpertProduct) -> torch.Tensor:
        """Return the lines of all experts' factors [experts * (1 + slots), columns]."""
        return self._whole_table()[self._places_of(product)].flatten(0, 1)

    def most_ranks_of(self, product: ExpertProduct) -> int:
        """Return the number of ranks that a product of experts needs room for."""
        return self._most_ranks(self._places_of(product), product.parts)

    def _places_of(self, product: ExpertProduct) -> slice:
        first = self._index[product.first]
        return slice(first, first + product.experts)

    def _place_of(self, name: str) -> slice:
        return slice(self._index[name], self._index[name] + 1)

    def _shrunk(self, site: Site, inputs: torch.Tensor) -> torch.Tensor:
        assert self._tiles is not None, "some token has an adapter"
        parts = len(site.parts)
        most_ranks = self._most_ranks(self._place_of(site.name), parts)
        return programs.shrunk_inputs(self._tiles, self._lines(site.name), parts, most_ranks, inputs)

    def _lines(self, name: str) -> torch.Tensor:
        return self._whole_table()[self._index[name]]

    def _may_change(self, places: slice) -> bool:
        """Return whether any adapter changes products; in a graph, and before there are any, one may."""
        return self._is_capturing() or any(self._most[places]) or not self._has_factors

    def _most_ranks(self, places: slice, parts: int) -> int:
        """Return the number of ranks that products of `parts` need room for; in a graph, those of any adapter."""
        if self._is_capturing():
            return MOST_RANKS * parts
        return max(self._most[places]) or parts * _FEW_RANKS

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _whole_table(self) -> torch.Tensor:
        """Return the table, made when all sites are known, before any pass."""
        if self._table is None:
            names = [*(site.name for site in self.sites), EMBEDDING]
            self._index = {name: index for index, name in enumerate(names)}
            parts = max((len(site.parts) for site in self.sites), default=1)
            columns = programs.table_columns(parts)
            # Slots are emptied outside of inference, too.
            with torch.inference_mode(mode=False):
                self._table = torch.zeros(len(names), 1 + self.slots, columns, dtype=torch.int64, device=self._device)
            self._ranks = np.zeros((len(names), self.slots), np.int64)
            self._most = [0] * len(names)
        return self._table


class ExpertProduct:
    """One product of each expert of a layer, whose lines are adjacent in the table of adapters."""

    def __init__(self, adapters: SegmentedAdapters, sites: Sequence[Site]) -> None:
        """Take the factors of `adapters`; `sites` are those of the experts in order, alike but for their names."""
        self.first, self.experts = sites[0].name, len(sites)
        self.parts = len(sites[0].parts)
        self._adapters = adapters

    def shrunk(self, tiles: programs.TokenTiles, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table's lines, and the products of inputs [pairs, in] with the first factors."""
        lines, ranks = self._adapters.lines_of(self), self._adapters.most_ranks_of(self)
        return lines, programs.shrunk_inputs(tiles, lines, self.parts, ranks, inputs)


class SegmentedExperts:
    """The experts of a layer with what adapters add to each of their matrices; see `Experts`."""

    def __init__(
        self, experts: GpuExperts, gate_up: ExpertProduct, down: ExpertProduct, activation: Activation,
        adapters: SegmentedAdapters,
    ) -> None:  # fmt: skip
        """Add the products of `adapters` to those of `experts`."""
        self._experts = experts
        self._products = (gate_up, down)
        self._activation = activation
        self._adapters = adapters

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum, without waiting for the device."""
        tiles = self._adapters.tiles_of(expert_ids, self._products)
        if tiles is None:
            return self._experts(inputs, expert_ids, routing_weights)
        changes = _ChangesOfPairs(tiles, *self._products, self._activation)
        return self._experts.changed(inputs, expert_ids, routing_weights, changes)


class _ChangesOfPairs(NamedTuple):
    """The products that adapters add to the pairs of a pass; see `PairChanges`."""

    tiles: programs.TokenTiles
    gate_up: ExpertProduct
    down: ExpertProduct
    activation: Activation

    def gate(self, inputs: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        lines, shrunk = self.gate_up.shrunk(self.tiles, inputs)
        return programs.gated_products(self.tiles, lines, self.gate_up.parts, shrunk, both, self.activation)

    def add(self, inner: torch.Tensor, outputs: torch.Tensor) -> None:
        lines, shrunk = self.down.shrunk(self.tiles, inner)
        programs.add_products(self.tiles, lines, self.down.parts, shrunk, outputs)


def _laid_out(weights: AdapterWeights) -> Iterator[tuple[str, torch.Tensor, tuple[programs.PartLines, ...]]]:
    """Yield name, `a`, and parts of each changed product as programs read them."""
    for name, site in weights.sites.items():
        yield name, *programs.lay_out(site.a, site.parts)
    if weights.embedding is not None:
        yield EMBEDDING, *programs.lay_out_embedding(weights.embedding.a, weights.embedding.b)
