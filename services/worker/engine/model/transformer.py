"""The forward pass of the Llama family: what is computed, not how (that is `kernels/`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.kernels.interface import AttentionBackend, GatedLinear, HeadNorms, Kernels, Linear
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.parallel.shards import Span


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, on this rank. `attention_output` and `down` give partial sums when ranks share the model."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear
    head_norms: HeadNorms | None
    attention_output: Linear
    feed_forward_norm: torch.Tensor  # [hidden]
    gate_up: GatedLinear
    down: Linear


@dataclass(frozen=True, slots=True)
class TransformerWeights:
    """All weights on this rank: some rows of embedding and head, and its share of each layer."""

    embedding: torch.Tensor  # [vocabulary part, hidden]
    layers: Sequence[DecoderLayer]
    output_norm: torch.Tensor  # [hidden]
    head: Linear


class Transformer:
    """Computes logits and, on the way, fills the KV pool."""

    def __init__(
        self,
        weights: TransformerWeights,
        norm_epsilon: float,
        vocabulary: tuple[Span, ...],
        *,
        kernels: Kernels,
        attention: AttentionBackend,
        group: RankGroup,
    ) -> None:
        """Run `weights`, the share of `group.rank`; `vocabulary` [ranks] says which logits each rank computes."""
        self._weights = weights
        self._epsilon = norm_epsilon
        self._vocabulary = vocabulary
        self._kernels = kernels
        self._attention = attention
        self._group = group

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Return logits [samples, vocabulary] in the type of the activations on rank 0, [0, vocabulary] elsewhere."""
        hidden = self._embed(batch.token_ids)
        *inner, last = zip(self._weights.layers, pool.layers, strict=True)
        for layer, kv in inner:
            attended = self._attention.store_and_attend(self._project(layer, hidden), kv, layer.head_norms, batch)
            self._finish_layer(layer, hidden, attended)
        layer, kv = last
        projected = self._project(layer, hidden)
        if batch.sample_indices.shape[0] == 0:
            self._attention.store(projected, kv, layer.head_norms, batch)
            return hidden.new_empty(0, self._vocabulary[-1].stop)
        sampled = sampled_rows(batch)
        if sampled is None:
            attended = self._attention.store_and_attend(projected, kv, layer.head_norms, batch)
            self._finish_layer(layer, hidden, attended)
            # A pass that only decodes samples every token.
            hidden = hidden if batch.decode_rows == hidden.shape[0] else hidden[batch.sample_indices]
        else:
            # Nothing reads the last layer's output at other tokens: their KV is stored, which is all they are for.
            hidden = hidden[batch.sample_indices]
            queries = self._attention.store(projected, kv, layer.head_norms, batch)
            self._finish_layer(layer, hidden, self._attention.attend(queries[batch.sample_indices], kv, sampled))
        hidden = self._kernels.rms_norm(hidden, self._weights.output_norm, self._epsilon)
        return self._group.gather_columns(self._weights.head(hidden), self._vocabulary)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.world_size == 1:
            return self._weights.embedding[token_ids].to(self._kernels.activation_dtype)
        mine = self._vocabulary[self._group.rank]
        is_mine = (token_ids >= mine.start) & (token_ids < mine.stop)
        rows = self._weights.embedding[(token_ids - mine.start) * is_mine].to(self._kernels.activation_dtype)
        return self._group.sum(rows * is_mine[:, None])

    def _project(self, layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        return layer.qkv(self._kernels.rms_norm(hidden, layer.input_norm, self._epsilon))

    def _finish_layer(self, layer: DecoderLayer, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Add what attention and feed-forward of `layer` contribute to the residual stream `hidden`, in place."""
        self._add(layer.attention_output, attended, hidden)
        normed = self._kernels.rms_norm(hidden, layer.feed_forward_norm, self._epsilon)
        self._add(layer.down, layer.gate_up(normed), hidden)

    def _add(self, linear: Linear, inputs: torch.Tensor, hidden: torch.Tensor) -> None:
        if self._group.world_size == 1:
            linear.add_to(inputs, hidden)
        else:
            hidden += self._group.sum(linear(inputs))


def sampled_rows(batch: ForwardBatch) -> ForwardBatch | None:
    """Return `batch` with only the sampled tokens, one query per row, or None where that would save nothing.

    On a GPU it would cost a synchronisation, and a prefill there is not bound by one layer.
    """
    if batch.token_ids.device.type != "cpu" or batch.sample_indices.shape[0] == batch.token_ids.shape[0]:
        return None
    last_tokens = batch.query_starts[1:] - 1
    rows = torch.searchsorted(last_tokens, batch.sample_indices)
    if not torch.equal(last_tokens[rows].long(), batch.sample_indices):
        return None  # a row is sampled in its middle: its queries see fewer keys than `key_lengths` says
    samples = rows.shape[0]
    return replace(
        batch,
        token_ids=batch.token_ids[batch.sample_indices],
        positions=batch.positions[batch.sample_indices],
        query_starts=torch.arange(samples + 1, dtype=torch.int32),
        key_lengths=batch.key_lengths[rows],
        page_table=batch.page_table[rows],
        write_slots=batch.write_slots[batch.sample_indices],
        sample_indices=torch.arange(samples),
        decode_rows=samples,
        max_query_length=1,
    )
