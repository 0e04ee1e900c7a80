"""Attention of prefill chunks through FlashInfer (Ye et al., MLSys 2025): FlashAttention-3 kernels on Hopper."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import flashinfer
import numpy as np
import torch

from services.worker.engine.kernels.gpu.flashinfer_plans import PlanTurns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.worker.engine.kernels.interface import AttentionShape, KvLayer
    from services.worker.engine.model.batch import ForwardBatch

# Workspace for split rows, as FlashInfer's documentation recommends.
WORKSPACE_BYTES = 128 * 1024**2


class FlashInferPrefill:
    """Plans once per batch, on the host, and runs the plan in every layer; see `ChunkAttention`."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """Serve heads of `shape`; kernels are compiled when they are first used."""
        self._shape = shape
        self._device = device
        self._workspace = _workspace(device)
        self._turns = PlanTurns(self._make_wrapper, self._device)
        self._wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper | None = None
        self._planned: ForwardBatch | None = None
        self._kv_dtype: torch.dtype | None = None

    def __call__(
        self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if layer.keys.dtype != self._kv_dtype:
            # A wrapper keeps the kernels' family that its first plan has chosen, and FP8 has others.
            self._turns = PlanTurns(self._make_wrapper, self._device)
            self._planned, self._kv_dtype = None, layer.keys.dtype
        if batch is not self._planned:
            self._wrapper = self._plan(batch, queries.dtype, layer.keys.dtype)
            self._planned = batch
        scales = layer.scales
        if scales is not None:
            # FlashInfer takes one scale for all heads.
            group = self._shape.query_heads // self._shape.kv_heads
            queries = queries * scales.keys.repeat_interleave(group)[:, None].to(queries.dtype)
        self._run(queries, outputs, layer, sinks)
        if scales is not None:
            outputs *= scales.values.repeat_interleave(group)[:, None].to(outputs.dtype)

    def _make_wrapper(self) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")

    def _run(self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, sinks: torch.Tensor | None) -> None:
        assert self._wrapper is not None, "it has planned"
        if sinks is None:
            self._wrapper.run(queries, (layer.keys, layer.values), out=outputs)
            return
        # FlashInfer's kernels with sinks are others, to be compiled as well. Outputs can be scaled instead: the
        # logarithm to base 2 of the sum of exponentials, [tokens, query_heads], determines the sinks' share.
        _, sums = self._wrapper.run(queries, (layer.keys, layer.values), out=outputs, return_lse=True)
        outputs *= torch.sigmoid(sums * math.log(2) - sinks)[:, :, None].to(outputs.dtype)

    def _plan(
        self, batch: ForwardBatch, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
        size, window = self._shape.page_size, self._shape.window_left
        if self._shape.is_chunked and window is not None:
            # Each row's part of a chunk is a row of its own, which sees all that it has.
            chunks, window = chunk_pages(batch, size, window + 1), None
        else:
            chunks = chunk_pages(batch, size)
        return self._turns.plan(
            lambda wrapper: wrapper.plan(
                chunks.query_starts,
                chunks.page_starts,
                chunks.pages,
                (chunks.key_lengths - 1) % size + 1,
                self._shape.query_heads,
                self._shape.kv_heads,
                self._shape.head_dim,
                size,
                causal=True,
                sm_scale=self._shape.scale,
                window_left=-1 if window is None else window,
                logits_soft_cap=self._shape.attention_softcap,
                q_data_type=dtype,
                kv_data_type=kv_dtype,
            )
        )


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Return memory that all kinds of layers share: a device computes one after the other."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """The rows of a batch that prefill, in host memory: int32, as FlashInfer takes them."""

    query_starts: torch.Tensor  # [rows + 1]
    page_starts: torch.Tensor  # [rows + 1], into `pages`
    pages: torch.Tensor
    key_lengths: torch.Tensor  # [rows]


def chunk_pages(batch: ForwardBatch, page_size: int, cut: int | None = None) -> ChunkPages:
    """Return a batch's chunks; waits for the device only if the batch was made there.

    With `cut`, a multiple of the page size, sequences are cut after every so many tokens, and each part is a row.
    """
    first = batch.decode_rows
    if batch.host is not None:
        starts, lengths, table = batch.host.query_starts, batch.host.key_lengths, batch.host.page_table
    else:
        starts, lengths, table = (
            tensor.cpu().numpy() for tensor in (batch.query_starts, batch.key_lengths, batch.page_table)
        )
    counts, lengths, table = np.diff(starts[first:]), lengths[first:], table[first:]
    hidden = np.zeros_like(lengths)  # keys before the first one that a row sees
    if cut is not None:
        parts = [_cut(count, length, cut) for count, length in zip(counts.tolist(), lengths.tolist(), strict=True)]
        table = table.repeat([len(part) for part in parts], axis=0)
        counts, lengths, hidden = np.concatenate(parts).T
    places, least, most = np.arange(table.shape[1]), hidden // page_size, -(-lengths // page_size)
    in_use = (places >= least[:, None]) & (places < most[:, None])
    return ChunkPages(
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        torch.from_numpy(np.concatenate([[0], np.cumsum(most - least)]).astype(np.int32)),
        torch.from_numpy(table[in_use]),
        torch.from_numpy((lengths - hidden).astype(np.int32)),
    )


def _cut(queries: int, length: int, size: int) -> NDArray[np.int64]:
    """Return queries, key length and hidden keys [parts, 3] of the last `queries` of `length` tokens, cut by `size`."""
    starts = np.arange((length - queries) // size * size, length, size)
    ends = np.minimum(starts + size, length)
    return np.stack((ends - np.maximum(starts, length - queries), ends, starts), axis=1)
