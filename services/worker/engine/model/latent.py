"""Multi-head latent attention with absorbed projections; see `LatentConfig`.

The part of the key-value projection that makes keys is multiplied into queries, the part that makes values into outputs
(DeepSeek-V2, section 2.1.2). So no token's keys and values are ever computed: not in decoding, where they would be read
for every new token, nor in prefills, which would compute those of cached tokens again in each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.worker.engine.model.rotary_config import head_order
from services.worker.engine.quantization.matrices import above, are_alike, reordered

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.kernels.interface import Kernels, Linear
    from services.worker.engine.model.config import LatentConfig, RotaryConfig
    from services.worker.engine.model.tensors import CheckedTensors
    from services.worker.engine.parallel.shards import Span
    from services.worker.engine.quantization.matrices import Matrix

# Of the norms within the projections, in all published models; `rms_norm_eps` is that of the other norms.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class CompressedQueries:
    """The norm [query_rank] of a compressed query, and the product that makes all heads' queries of it."""

    norm: torch.Tensor
    product: Linear


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """Computes what attention over rows takes: each head's query for them, and the new token's row."""

    latent: LatentConfig
    heads: int
    """Of this rank."""
    kernels: Kernels
    first: Callable[[torch.Tensor], torch.Tensor]
    """Makes rows of the layer's inputs, and before them queries, or what `compressed` makes them of."""
    compressed: CompressedQueries | None
    row_norm: torch.Tensor  # [rank]
    key_weights: torch.Tensor  # [heads, content_dim, rank]
    """Weights of the projection from latent vectors to keys, which queries are multiplied by instead."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return queries and row of inputs [tokens, hidden], not yet rotated, [tokens, (heads + 1) * row_width]."""
        latent, heads, kernels = self.latent, self.heads, self.kernels
        projected = self.first(inputs)
        queries, rows = projected[:, : -latent.row_width], projected[:, -latent.row_width :]
        if self.compressed is not None:
            normed = kernels.rms_norm(queries.contiguous(), self.compressed.norm, _EPSILON)
            queries = self.compressed.product(normed)
        by_head = queries.view(-1, heads, latent.query_dim)
        joined = projected.new_empty(inputs.shape[0], heads + 1, latent.row_width)
        absorbed = joined[:, :heads, : latent.rank].transpose(0, 1)
        torch.bmm(by_head[..., : latent.content_dim].transpose(0, 1), self.key_weights, out=absorbed)
        joined[:, :heads, latent.rank :] = by_head[..., latent.content_dim :]
        joined[:, heads, : latent.rank] = kernels.rms_norm(rows[:, : latent.rank].contiguous(), self.row_norm, _EPSILON)
        joined[:, heads, latent.rank :] = rows[:, latent.rank :]
        return joined.flatten(1)


class LatentValues:
    """Makes each head's output of the weighted sum of latent vectors that attention returns."""

    def __init__(self, weights: torch.Tensor) -> None:
        """Multiply with `weights` [heads, rank, value_dim]."""
        self._weights = weights

    def __call__(self, attended: torch.Tensor) -> torch.Tensor:
        """Return outputs [tokens, heads * value_dim] of sums [tokens, heads * rank]."""
        heads, rank, value_dim = self._weights.shape
        values = attended.new_empty(attended.shape[0], heads, value_dim)
        torch.bmm(attended.view(-1, heads, rank).transpose(0, 1), self._weights, out=values.transpose(0, 1))
        return values.flatten(1)


@dataclass(frozen=True, slots=True)
class LatentReader:
    """Reads the projections of one rank's heads; rows are every rank's own, computed from the same weights."""

    tensors: CheckedTensors
    kernels: Kernels
    device: torch.device
    heads: Span

    def read(self, attention: str) -> tuple[LatentProjection, LatentValues]:
        """Read the layer whose names begin with `attention`."""
        config = self.tensors.checkpoint.config
        latent = config.latent
        assert latent is not None, "the model has latent attention"
        queries = self.heads.scaled(latent.query_dim)
        name = "q_proj" if latent.query_rank is None else "q_a_proj"
        first = self.tensors.matrix(f"{attention}.{name}.weight", queries if latent.query_rank is None else None)
        row = self.tensors.matrix(f"{attention}.kv_a_proj_with_mqa.weight")
        row, compressed = _in_head_order(row, config.rotary, latent.rank, latent.rotary_dim), None
        if latent.query_rank is None:
            first = _in_head_order(first, config.rotary, latent.content_dim, latent.rotary_dim)
        else:
            expand = self.tensors.matrix(f"{attention}.q_b_proj.weight", queries)
            expand = _in_head_order(expand, config.rotary, latent.content_dim, latent.rotary_dim)
            product = self.kernels.linear(expand, None)
            compressed = CompressedQueries(self._norm(f"{attention}.q_a_layernorm.weight"), product)
        key_weights, value_weights = self._absorbed(f"{attention}.kv_b_proj.weight", latent)
        projection = LatentProjection(
            latent,
            len(self.heads),
            kernels=self.kernels,
            first=self._side_by_side(first, row),
            compressed=compressed,
            row_norm=self._norm(f"{attention}.kv_a_layernorm.weight"),
            key_weights=key_weights,
        )
        return projection, LatentValues(value_weights)

    def _side_by_side(self, first: Matrix, second: Matrix) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return one product where it can be: some quantised checkpoints keep one of the matrices as it was."""
        if are_alike((first, second)):
            return self.kernels.linear(above(first, second), None)
        products = [self.kernels.linear(matrix, None) for matrix in (first, second)]
        return lambda inputs: torch.cat([product(inputs) for product in products], dim=1)

    def _absorbed(self, name: str, latent: LatentConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projections to keys and to values, cut out of one tensor and therefore dequantised."""
        height = latent.content_dim + latent.value_dim
        weights = self.tensors.dequantised(name, self.heads.scaled(height)).to(
            self.device, self.kernels.activation_dtype
        )
        by_head = weights.view(len(self.heads), height, latent.rank)
        keys, values = by_head[:, : latent.content_dim], by_head[:, latent.content_dim :]
        return keys.contiguous(), values.contiguous().transpose(1, 2)

    def _norm(self, name: str) -> torch.Tensor:
        return self.tensors.plain(name).to(self.device, self.kernels.activation_dtype, copy=True)


def _in_head_order(matrix: Matrix, rotary: RotaryConfig, still: int, rotated: int) -> Matrix:
    """Return a matrix whose outputs are heads of `still` and then `rotated` components, the latter in our order."""
    order = head_order(rotary, rotated)
    if order is None:
        return matrix
    width = still + rotated
    within = torch.tensor([*range(still), *(still + place for place in order)])
    return reordered(matrix, (torch.arange(0, matrix.shape[0], width)[:, None] + within).flatten())
