"""Latent attention on a GPU: all tokens by our own program, or chunks by FlashInfer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.gpu.latent_programs import LatentRowAttention, rotate_and_store
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, QkNorm

if TYPE_CHECKING:
    from services.worker.engine.kernels.gpu.attention import ChunkAttention
    from services.worker.engine.model.batch import ForwardBatch


class GpuLatentAttention:
    """See `AttentionBackend`; a token's row is keys and values of all heads.

    Without FlashInfer each token of a chunk is a query of its own: its heads alone fill the tiles that tensor cores
    multiply, since they share all keys.
    """

    layout = KvLayout.TOKEN_MAJOR

    def __init__(
        self, shape: AttentionShape, angles: torch.Tensor, chunks: ChunkAttention | None, max_rows: int
    ) -> None:
        """Serve up to `max_rows` decoding rows at once; `angles` is `rotary_table`'s."""
        self._shape = shape
        self._angles = angles
        self._chunks = chunks
        self._program = LatentRowAttention(shape, angles.device)
        self._own_rows = torch.arange(max_rows, dtype=torch.int32, device=angles.device)
        self._located: tuple[ForwardBatch, torch.Tensor, torch.Tensor] | None = None

    def store(self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch) -> torch.Tensor:
        """Rotate, write rows, return queries; see `AttentionBackend.store`."""
        return rotate_and_store(qkv, layer, batch, self._shape, self._angles)

    def attend(
        self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over cached and new tokens; see `AttentionBackend.attend`."""
        assert sinks is None, "no model of latent attention has sinks"
        outputs = queries.new_empty(queries.shape[0], self._shape.output_width)
        if batch.decode_rows == batch.rows:
            self._attend_decoding(queries, outputs, layer, batch)
            return outputs
        attend = partial(self._attend_all, layer)
        if batch.defer is None:
            attend(queries, outputs, batch)
        else:
            batch.defer(attend, queries, outputs, in_window=False)
        return outputs

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.attend(self.store(qkv, layer, norms, batch), layer, batch, sinks)

    def _attend_decoding(
        self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, batch: ForwardBatch
    ) -> None:
        rows = self._own_rows if batch.table_rows is None else batch.table_rows
        self._program(queries, outputs, layer, batch.page_table, rows[: batch.decode_rows], batch.key_lengths)

    def _attend_all(self, layer: KvLayer, queries: torch.Tensor, outputs: torch.Tensor, batch: ForwardBatch) -> None:
        """Fill `outputs` from `queries`, of rows that decode, which come first, and of chunks."""
        if self._chunks is None:
            self._program(queries, outputs, layer, batch.page_table, *self._locate(batch))
            return
        decoding, shape = batch.decode_rows, self._shape
        if decoding:
            self._attend_decoding(queries[:decoding], outputs[:decoding], layer, batch)
        self._chunks(
            queries[decoding:].unflatten(1, (shape.query_heads, shape.head_dim)),
            outputs[decoding:].unflatten(1, (shape.query_heads, shape.value_dim)),
            layer,
            batch,
        )

    def _locate(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's row of the page table and how many keys it sees, [tokens] int32, once per batch."""
        if self._located is None or self._located[0] is not batch:
            tokens = torch.arange(batch.positions.shape[0], dtype=torch.int32, device=batch.positions.device)
            rows = torch.searchsorted(batch.query_starts[1:], tokens, right=True, out_int32=True)
            if batch.table_rows is not None:
                rows = batch.table_rows[rows]
            self._located = batch, rows, (batch.positions + 1).int()
        return self._located[1:]
