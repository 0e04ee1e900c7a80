"""Products of rows that each use an adapter of their own, or none, by programs that CUDA graphs can contain."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from services.worker.engine.adapters.sites import EMBEDDING
from services.worker.engine.kernels.gpu import adapter_products as programs

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

    def __init__(self, slots: int, device: torch.device) -> None:
        """Start with `slots` empty slots on `device`."""
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
        self._tiles: programs.TokenTiles | None = None
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
        self._held[slot] = tuple(held)

    def clear(self) -> None:
        """Empty all slots."""
        if self._table is not None:
            self._table.zero_()
        self._ranks[:] = 0
        self._most = [0] * len(self._most)
        self._held = [()] * self.slots
        self._tiles = None

    def use(self, slots: torch.Tensor | None) -> None:
        """Set what the following products apply to; see `AdapterProducts.use`."""
        if slots is None or not slots.shape[0]:
            self._tiles = None
            return
        self._whole_table()
        self._tiles = programs.TokenTiles.of(slots, self.slots)

    def start(self, site: Site, inputs: torch.Tensor) -> AbstractContextManager[torch.Tensor | None]:
        """Begin with the adapters' products of inputs [tokens, in] beside what runs in the context."""
        if self._tiles is None or not self._may_change(site.name):
            return nullcontext()
        if len(self._tiles.order) > _BESIDE_TOKENS or len(self._tiles.tiles) > _BESIDE_TILES:
            return nullcontext()
        if self._device.type != "cuda":  # where programs are interpreted
            return nullcontext()
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        parts = len(site.parts)
        return programs.ShrinkingBeside(
            self._side, self._tiles, self._lines(site.name), parts, self._most_ranks(site.name, parts), inputs
        )

    def add(self, site: Site, inputs: torch.Tensor, sums: torch.Tensor, started: torch.Tensor | None = None) -> None:
        """Add the adapters' products of inputs [tokens, in] to `sums` [tokens, out] in place."""
        if self._tiles is not None and self._may_change(site.name):
            shrunk = self._shrunk(site, inputs) if started is None else started
            lines, parts = self._lines(site.name), len(site.parts)
            programs.add_products(self._tiles, lines, parts, shrunk, sums, is_joined=started is not None)

    def gate(self, product: GatedLinear, site: Site, activation: Activation, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product, from separate halves where any token has an adapter."""
        if self._tiles is None or not self._may_change(site.name):
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
        if self._tiles is None or not self._may_change(EMBEDDING):
            return rows
        changed, ranks = rows.clone(), self._most_ranks(EMBEDDING, 1)
        programs.add_embeddings(self._tiles, self._lines(EMBEDDING), ranks, token_ids, changed)
        return changed

    def experts(self, loop: Experts, _sites: Sequence[tuple[Site, Site]], _activation: Activation) -> Experts:
        """Return `loop`: experts run as one program, which no adapter changes."""
        return loop

    def _shrunk(self, site: Site, inputs: torch.Tensor) -> torch.Tensor:
        assert self._tiles is not None, "some token has an adapter"
        parts = len(site.parts)
        most_ranks = self._most_ranks(site.name, parts)
        return programs.shrunk_inputs(self._tiles, self._lines(site.name), parts, most_ranks, inputs)

    def _lines(self, name: str) -> torch.Tensor:
        return self._whole_table()[self._index[name]]

    def _may_change(self, name: str) -> bool:
        """Return whether any adapter changes a product; in a graph, and before there are any, one may."""
        return self._is_capturing() or bool(self._most[self._index[name]]) or not any(self._most)

    def _most_ranks(self, name: str, parts: int) -> int:
        """Return how many ranks a product of `parts` needs room for; in a graph, those of any adapter."""
        if self._is_capturing():
            return MOST_RANKS * parts
        return self._most[self._index[name]] or parts * _FEW_RANKS

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


def _laid_out(weights: AdapterWeights) -> Iterator[tuple[str, torch.Tensor, tuple[programs.PartLines, ...]]]:
    """Yield name, `a`, and parts of each changed product as programs read them."""
    for name, site in weights.sites.items():
        yield name, *programs.lay_out(site.a, site.parts)
    if weights.embedding is not None:
        yield EMBEDDING, *programs.lay_out_embedding(weights.embedding.a, weights.embedding.b)
