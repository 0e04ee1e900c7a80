"""Attention in plain torch, on any device: the reference that every other back end is tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, QkNorm
from services.worker.engine.kernels.torch.kernels import rms_norm
from services.worker.engine.quantization.fp8 import FP8, LARGEST

if TYPE_CHECKING:
    from services.worker.engine.model.batch import ForwardBatch


class TorchAttention:
    """Gathers each row's pages and attends with torch's own kernels: decoding rows at once, chunks one by one."""

    layout = KvLayout.TOKEN_MAJOR

    def __init__(self, shape: AttentionShape, rotary: torch.Tensor) -> None:
        """Serve heads of `shape`; `rotary` is `rotary_table`'s."""
        self._shape = shape
        self._angles = rotary

    def store(self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch) -> torch.Tensor:
        """Rotate, write keys and values, return queries; see `AttentionBackend.store`."""
        shape = self._shape
        if shape.latent_dim is not None:
            return self._store_rows(qkv, layer, batch)
        queries, keys, values = qkv.tensor_split([shape.query_width, shape.query_width + shape.kv_width], dim=1)
        heads = torch.cat((queries, keys), dim=1).view(-1, shape.query_heads + shape.kv_heads, shape.head_dim)
        if norms is not None:
            heads = torch.cat(
                (
                    rms_norm(heads[:, : shape.query_heads], norms.query, norms.epsilon),
                    rms_norm(heads[:, shape.query_heads :], norms.key, norms.epsilon),
                ),
                dim=1,
            )
        heads = self._rotate(heads, batch)
        slots = (-1, shape.kv_heads, shape.head_dim)
        keys, values = heads[:, shape.query_heads :], values.reshape(slots)
        if layer.scales is None:
            keys, values = keys.to(layer.keys.dtype), values.to(layer.values.dtype)
        else:
            keys, values = quantise_heads(keys, layer.scales.keys), quantise_heads(values, layer.scales.values)
        layer.keys.view(slots)[batch.write_slots] = keys
        layer.values.view(slots)[batch.write_slots] = values
        return heads[:, : shape.query_heads].flatten(1)

    def attend(
        self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over cached and new tokens; see `AttentionBackend.attend`."""
        heads = queries.view(-1, self._shape.query_heads, self._shape.head_dim)
        outputs = heads.new_empty(*heads.shape[:2], self._shape.value_dim)
        if batch.decode_rows:
            outputs[: batch.decode_rows] = self._decode(heads[: batch.decode_rows], layer, batch, sinks)
        if batch.decode_rows < batch.rows:
            starts, lengths = batch.query_starts.tolist(), batch.key_lengths.tolist()
            blocks = [] if batch.blocks is None else batch.blocks.tolist()
            for row in range(batch.decode_rows, batch.rows):
                chunk = slice(starts[row], starts[row + 1])
                ends = torch.arange(lengths[row] - heads[chunk].shape[0], lengths[row]) + 1
                for _, first, last, keys in (block for block in blocks if block[0] == row):
                    ends[first - starts[row] : last - starts[row]] = keys
                table, ends = batch.page_table[row], ends.to(heads.device)
                outputs[chunk] = self._prefill(heads[chunk], layer, table, lengths[row], ends, sinks)
        return outputs.flatten(1)

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.attend(self.store(qkv, layer, norms, batch), layer, batch, sinks)

    def _store_rows(self, projected: torch.Tensor, layer: KvLayer, batch: ForwardBatch) -> torch.Tensor:
        """Rotate the last components of queries and of the row after them, write the row."""
        shape = self._shape
        heads = projected.view(-1, shape.query_heads + 1, shape.head_dim)
        rotated = heads[..., shape.value_dim :]
        rotated.copy_(self._rotate(rotated, batch))
        layer.keys.view(-1, shape.head_dim)[batch.write_slots] = heads[:, -1].to(layer.keys.dtype)
        return projected[:, : shape.query_width]

    def _rotate(self, heads: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        table = self._angles if batch.angles is None else batch.angles
        cosines, sines = table[batch.positions][:, None].chunk(2, dim=-1)
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(heads.dtype)

    def _decode(
        self, heads: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        rows = batch.decode_rows
        # The longest key may belong to a row that prefills, but then its pages are in the table all the same.
        pages = -(-batch.max_key_length // self._shape.page_size)
        table = batch.page_table[:rows, :pages].long().clamp(0, layer.keys.shape[0] - 1)
        keys, values = self._gather(layer, table, heads.dtype)
        places = torch.arange(keys.shape[2], device=heads.device)
        lengths = batch.key_lengths[:rows, None]
        visible = self._visible(places, lengths - 1, lengths)
        # Entries after a row's length may name any page; masks remove only finite values.
        values = values.masked_fill(~visible[:, None, :, None], 0.0)
        return self._attend(heads[:, :, None], keys, values, visible[:, None, None], sinks)[:, :, 0]

    def _prefill(
        self, heads: torch.Tensor, layer: KvLayer, table: torch.Tensor, length: int, ends: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output of the last tokens of `length`; `ends` [tokens] are how many keys each sees."""
        pages = table[None, : -(-length // self._shape.page_size)].long()
        keys, values = (part[:, :, :length] for part in self._gather(layer, pages, heads.dtype))
        places = torch.arange(length, device=heads.device)
        visible = self._visible(places, places[length - heads.shape[0] :, None], ends[:, None])
        return self._attend(heads.transpose(0, 1)[None], keys, values, visible, sinks)[0].transpose(0, 1)

    def _visible(self, places: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return which keys at `places` [keys] queries at `positions` [queries, 1] see, [queries, keys].

        They see none from `ends` [queries, 1] on.
        """
        visible = places[None, :] < ends
        if self._shape.window_left is not None:
            visible &= places[None, :] >= self._shape.first_seen(positions)
        return visible

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return [rows, heads, queries, head_dim] from queries of that shape and a mask that fits their scores."""
        cap, scale = self._shape.attention_softcap, self._shape.scale
        if cap is None and sinks is None:
            return scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
        return explicit_attention(queries, keys, values, visible, self._shape, sinks)

    def _gather(self, layer: KvLayer, table: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [rows, kv_heads, pages * page_size, components] of pages in `table` [rows, pages]."""
        keys, *values = (pool[table].flatten(1, 2).transpose(1, 2) for pool in layer.stored)
        if layer.scales is not None:
            return widen_heads(keys, layer.scales.keys, dtype), widen_heads(values[0], layer.scales.values, dtype)
        keys = keys.to(dtype)
        return keys, values[0].to(dtype) if values else keys[..., : self._shape.value_dim]


def quantise_heads(heads: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return heads [tokens, kv_heads, head_dim] in FP8, see `KvScales`; not-a-number stays so."""
    return (heads.float() / scales[:, None]).clamp(-LARGEST, LARGEST).to(FP8)


def widen_heads(heads: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return heads [rows, kv_heads, tokens, head_dim] in FP8 as numbers of `dtype`."""
    return (heads.float() * scales[:, None, None]).to(dtype)


def explicit_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, shape: AttentionShape,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return `scaled_dot_product_attention` with scores that a hyperbolic tangent bends into (-cap, cap), and sinks."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1).float() for tensor in (keys, values))
    scores = queries.float() @ keys.transpose(-1, -2) * shape.scale
    if (cap := shape.attention_softcap) is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    shares = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return (shares @ values).to(queries.dtype)
