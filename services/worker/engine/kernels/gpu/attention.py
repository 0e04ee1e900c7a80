"""Attention on a GPU: decoding rows by our own program, chunks by FlashInfer or, without it, by torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from services.worker.engine.kernels.gpu import elementwise
from services.worker.engine.kernels.gpu.decode_attention import DecodeAttention
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, QkNorm
from services.worker.engine.kernels.torch.attention import explicit_attention, widen_heads

if TYPE_CHECKING:
    from services.worker.engine.model.batch import ForwardBatch


_MOST_ROWS_AT_ONCE = 64
# Components of heads are multiples of this: torch's fast kernels want whole vectors.
_SINK_COMPONENTS = 8


class ChunkAttention(Protocol):
    """Attention of the rows of a batch that prefill."""

    def __call__(
        self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill `outputs` from `queries`, both [tokens of chunks, query_heads, head_dim]."""


class GpuAttention:
    """See `AttentionBackend`; keys and values lie head by head within a page."""

    layout = KvLayout.HEAD_MAJOR

    def __init__(self, shape: AttentionShape, angles: torch.Tensor, chunks: ChunkAttention, max_rows: int) -> None:
        """Serve up to `max_rows` decoding rows at once; `angles` is `rotary_table`'s."""
        self._shape = shape
        self._angles = angles
        self._chunks = chunks
        self._blocks = BlockAttention(shape)
        self._decode = DecodeAttention(shape, max_rows, angles.device)
        self._own_rows = torch.arange(max_rows, dtype=torch.int32, device=angles.device)

    def store(self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch) -> torch.Tensor:
        """Rotate, write keys and values, return queries; see `AttentionBackend.store`."""
        angles = self._angles if batch.angles is None else batch.angles
        return elementwise.rotate_and_store(qkv, layer, norms, batch, self._shape, angles)

    def attend(
        self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over cached and new tokens; see `AttentionBackend.attend`."""
        decoding = batch.decode_rows
        if decoding == batch.rows:
            return self._attend_decoding(queries, layer, batch, sinks)
        outputs = queries.new_empty(queries.shape)
        attend = partial(self._attend_chunks, layer, sinks)
        if batch.defer is None:
            attend(queries, outputs, batch)
        else:
            batch.defer(attend, queries, outputs, in_window=batch.is_in_window)
        return outputs

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Do both in one program where few rows decode: with many, a longer start of each costs more than a launch."""
        if batch.decode_rows != batch.rows or batch.rows > _MOST_ROWS_AT_ONCE or batch.angles is not None:
            return self.attend(self.store(qkv, layer, norms, batch), layer, batch, sinks)
        return self._decode.store_and_attend(
            qkv,
            layer,
            batch.page_table,
            self._rows_of(batch),
            batch.key_lengths,
            (batch.positions, self._angles),
            norms,
            sinks,
        )

    def _attend_chunks(
        self, layer: KvLayer, sinks: torch.Tensor | None, queries: torch.Tensor, outputs: torch.Tensor,
        batch: ForwardBatch,
    ) -> None:  # fmt: skip
        """Fill `outputs` from `queries`, both [tokens, query_heads * head_dim]; rows that decode come first."""
        decoding = batch.decode_rows
        if decoding:
            self._attend_decoding(queries[:decoding], layer, batch, sinks, outputs[:decoding])
        heads = (-1, self._shape.query_heads, self._shape.head_dim)
        by_head, attended = queries.view(heads), outputs.view(heads)
        self._chunks(by_head[decoding:], attended[decoding:], layer, batch, sinks)
        if batch.blocks is not None:
            # The chunks' kernels are causal: what tokens of blocks see is computed once more.
            self._blocks(by_head, attended, layer, batch, sinks)

    def _rows_of(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self._own_rows if batch.table_rows is None else batch.table_rows
        return rows[: batch.decode_rows]

    def _attend_decoding(
        self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None,
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self._decode(queries, layer, batch.page_table, self._rows_of(batch), batch.key_lengths, sinks, outputs)


class TorchChunkAttention:
    """Row by row over gathered pages: right everywhere, slow with many rows."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def __call__(
        self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        starts, lengths = host_lists(batch)
        first = starts[batch.decode_rows]
        for row in range(batch.decode_rows, batch.rows):
            chunk = slice(starts[row] - first, starts[row + 1] - first)
            pages = batch.page_table[row, : -(-lengths[row] // self._shape.page_size)].long()
            keys, values = gather(layer, pages, lengths[row], queries.dtype)
            attended = self._attend(
                queries[chunk].transpose(0, 1)[None].contiguous(),
                keys,
                values,
                lengths[row],
                sinks,
            )
            outputs[chunk] = attended[0].transpose(0, 1)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [1, heads, tokens, head_dim] of the last tokens of `length`."""
        shape, tokens = self._shape, queries.shape[2]
        if shape.attention_softcap is not None:
            visible = self._mask(tokens, length, queries.device)
            return explicit_attention(queries, keys, values, visible, shape, sinks)
        if sinks is not None:
            queries, keys, values = self._with_sinks(queries, keys, values, sinks)
        if shape.window_left is None:
            visible = causal_lower_right(tokens, keys.shape[2])
        else:
            visible = pad(self._mask(tokens, length, queries.device), (keys.shape[2] - length, 0), value=True)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, scale=shape.scale, enable_gqa=True
        )
        return attended[..., : shape.head_dim]

    def _with_sinks(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values with a first key whose scores are the sinks, and whose value is zero.

        Heads get more components: in the first of them queries have their sink, and this key has 1, the others 0.
        """
        more, width = _SINK_COMPONENTS, self._shape.head_dim
        queries = pad(queries, (0, more))
        queries[..., width] = (sinks / self._shape.scale).to(queries.dtype)[:, None]
        keys, values = (pad(each, (0, more, 1, 0)) for each in (keys, values))
        keys[:, :, 0, width] = 1.0
        return queries, keys, values

    def _mask(self, tokens: int, length: int, device: torch.device) -> torch.Tensor:
        """Return which keys the last `tokens` of `length` tokens see."""
        places = torch.arange(length, device=device)
        positions = places[length - tokens :, None]
        visible = places[None] <= positions
        return (
            visible
            if self._shape.window_left is None
            else visible & (places[None] >= self._shape.first_seen(positions))
        )


class BlockAttention:
    """Attention of tokens that see each other, block by block: a block has 256 tokens in Gemma 3.

    Each block ends where the keys that its tokens see do, so without a window nothing is masked, and torch's fast
    kernels apply; with one, there are few keys.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def __call__(
        self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, batch: ForwardBatch,
        sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Replace the outputs of tokens in blocks; both are [tokens, query_heads, head_dim]."""
        assert batch.blocks is not None, "called only for passes with blocks"
        assert sinks is None, "no family has both"
        shape, size = self._shape, self._shape.page_size
        for row, start, stop, end in batch.blocks.tolist():
            first, visible = 0, None
            if shape.window_left is not None:
                least, most = shape.first_seen(torch.tensor([end - (stop - start), end - 1])).clamp(min=0).tolist()
                first = least // size * size
                if most > first:
                    places = torch.arange(first, end, device=queries.device)
                    visible = places >= shape.first_seen(places[start - stop :, None])
            pages = batch.page_table[row, first // size : -(-end // size)].long()
            keys, values = gather(layer, pages, end - first, queries.dtype)
            outputs[start:stop] = self._attend(queries[start:stop].transpose(0, 1)[None], keys, values, visible)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [tokens, heads, head_dim]; `visible` [tokens, keys], None: all."""
        shape = self._shape
        if shape.attention_softcap is not None:
            if visible is None:
                visible = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=queries.device)
            return explicit_attention(queries, keys, values, visible, shape, None)[0].transpose(0, 1)
        attended = scaled_dot_product_attention(
            queries.contiguous(), keys, values, attn_mask=visible, scale=shape.scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


def gather(layer: KvLayer, pages: torch.Tensor, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [1, kv_heads, length, head_dim] of pages."""
    keys, values = (pool[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for pool in (layer.keys, layer.values))
    if layer.scales is None:
        return keys.to(dtype), values.to(dtype)
    return widen_heads(keys, layer.scales.keys, dtype), widen_heads(values, layer.scales.values, dtype)


def host_lists(batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Return query starts and key lengths; waits for the device only if the batch was made there."""
    if batch.host is not None:
        return batch.host.query_starts.tolist(), batch.host.key_lengths.tolist()
    return batch.query_starts.tolist(), batch.key_lengths.tolist()
