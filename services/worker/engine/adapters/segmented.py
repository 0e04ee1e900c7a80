"""Products of rows that each use an adapter of their own, or none, by programs that CUDA graphs can contain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from services.worker.engine.adapters.sites import EMBEDDING
from services.worker.engine.kernels.gpu import adapter_products as programs
from services.worker.engine.kernels.gpu import elementwise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.worker.engine.adapters.sites import AdapterWeights, Site
    from services.worker.engine.kernels.interface import Experts, GatedLinear
    from services.worker.engine.model.config import Activation

# Of one adapter in one matrix: buffers of CUDA graphs have room for them.
MOST_RANKS: Final = 512
# Of buffers outside of CUDA graphs, as long as adapters have no more.
_FEW_RANKS: Final = 16


class SegmentedAdapters:
    """Adapters that a table on the device names; see `AdapterProducts`.

    A pass that was captured as a CUDA graph serves whatever adapters are in the slots when it is replayed.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        """Start with `slots` empty slots on `device`."""
        self.sites: list[Site] = []
        self.most_ranks: int | None = MOST_RANKS
        self._device = device
        # The ranks of adapters, 0 where a slot is empty, and what the table's addresses point to, by slot.
        self._ranks = [0] * slots
        self._held: list[tuple[torch.Tensor, ...]] = [()] * slots
        self._table: torch.Tensor | None = None  # [sites and embedding, slots, columns] int64
        self._index: dict[str, int] = {}
        self._tiles: programs.TokenTiles | None = None

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._ranks)

    def put(self, slot: int, weights: AdapterWeights | None) -> None:
        """Fill a slot, or empty it, after all passes that were launched."""
        table = self._whole_table()
        columns = table.shape[2]
        lines = [[0] * columns] * table.shape[0]
        held: list[torch.Tensor] = []
        for name, a, parts in () if weights is None else _factors(weights):
            lines[self._index[name]] = programs.table_line(a, parts, columns)
            held += [a, *(b for _, _, b in parts)]
        table[:, slot].copy_(torch.tensor(lines, dtype=torch.int64))
        self._ranks[slot], self._held[slot] = 0 if weights is None else weights.rank, tuple(held)

    def clear(self) -> None:
        """Empty all slots."""
        if self._table is not None:
            self._table.zero_()
        self._ranks, self._held = [0] * self.slots, [()] * self.slots
        self._tiles = None

    def use(self, slots: torch.Tensor | None) -> None:
        """Set what the following products apply to; see `AdapterProducts.use`."""
        if slots is None or not slots.shape[0]:
            self._tiles = None
            return
        self._whole_table()
        self._tiles = programs.TokenTiles.of(slots, self.slots)

    def add(self, site: Site, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add the adapters' products of inputs [tokens, in] to `sums` [tokens, out] in place."""
        if self._tiles is not None:
            ranks = self._most_ranks(len(site.parts))
            programs.add_products(self._tiles, self._line(site.name), len(site.parts), ranks, inputs, sums)

    def gate(self, product: GatedLinear, site: Site, activation: Activation, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product, from separate halves where any token has an adapter."""
        if self._tiles is None:
            return product(inputs)
        both = product.halves(inputs)
        self.add(site, inputs, both)
        return elementwise.gate(both, activation)

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings [tokens, hidden] of `token_ids` with what adapters add to them."""
        if self._tiles is None:
            return rows
        changed = rows.clone()
        programs.add_embeddings(self._tiles, self._line(EMBEDDING), self._most_ranks(1), token_ids, changed)
        return changed

    def experts(self, loop: Experts, _sites: Sequence[tuple[Site, Site]], _activation: Activation) -> Experts:
        """Return `loop`: experts run as one program, which no adapter changes."""
        return loop

    def _line(self, name: str) -> torch.Tensor:
        return self._whole_table()[self._index[name]]

    def _most_ranks(self, parts: int) -> int:
        """Return how many ranks a product of `parts` needs room for; in a graph, those of any adapter."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return MOST_RANKS * parts
        return parts * (max(self._ranks) or _FEW_RANKS)

    def _whole_table(self) -> torch.Tensor:
        """Return the table, made when all sites are known, before any pass."""
        if self._table is None:
            names = [*(site.name for site in self.sites), EMBEDDING]
            self._index = {name: index for index, name in enumerate(names)}
            parts = max((len(site.parts) for site in self.sites), default=1)
            columns = programs.HEAD.value + parts * programs.OF_PART.value
            # Slots are emptied outside of inference, too.
            with torch.inference_mode(mode=False):
                self._table = torch.zeros(len(names), self.slots, columns, dtype=torch.int64, device=self._device)
        return self._table


def _factors(
    weights: AdapterWeights,
) -> Iterator[tuple[str, torch.Tensor, list[tuple[int, slice, torch.Tensor]]]]:
    """Yield name, `a`, and parts of each changed product, `b` transposed: first output, ranks, [ranks, outputs]."""
    for name, site in weights.sites.items():
        yield name, site.a, [(part.first, part.ranks, part.b.t().contiguous()) for part in site.parts]
    if weights.embedding is not None:
        a, b = weights.embedding.a, weights.embedding.b.t().contiguous()
        yield EMBEDDING, a, [(0, slice(0, b.shape[0]), b)]
