"""Attention by the compiled operators, straight from the pages."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.cpu.library import (
    ELEMENT_TYPES,
    AttentionArguments,
    CpuLibrary,
    StoreArguments,
)
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, QkNorm

if TYPE_CHECKING:
    from services.worker.engine.model.batch import ForwardBatch


class CpuAttention:
    """Reads keys and values where they lie; KV may be float32, float16, bfloat16 or FP8, sums are float32."""

    layout = KvLayout.LANES

    def __init__(self, library: CpuLibrary, shape: AttentionShape, rotary: torch.Tensor, threads: int) -> None:
        """Serve heads of `shape`, which `fits` accepted; `rotary` is `rotary_table`'s."""
        assert fits(library, shape), "head_dim and page_size were checked before"
        self.shape = shape
        self.angles = rotary.contiguous()
        self._library = library
        self._threads = threads

    def store(self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch) -> torch.Tensor:
        """Rotate, write keys and values, return queries; see `AttentionBackend.store`."""
        assert qkv.is_contiguous(), "operators take contiguous activations"
        shape = self.shape
        arguments = self.store_arguments(batch)
        arguments.qkv = qkv.data_ptr()
        arguments.slots = batch.write_slots.data_ptr()
        angles = self.angles if batch.angles is None else batch.angles
        arguments.angles = angles.data_ptr()
        if norms is not None:
            arguments.query_norm, arguments.key_norm = norms.query.data_ptr(), norms.key.data_ptr()
            arguments.epsilon = norms.epsilon
        arguments.key_scales, arguments.value_scales = scales_of(layer)
        self._library.store(
            ctypes.byref(arguments), layer.keys.data_ptr(), layer.values.data_ptr(), ELEMENT_TYPES[layer.keys.dtype]
        )
        return qkv[:, : shape.query_width]

    def attend(
        self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over cached and new tokens; see `AttentionBackend.attend`."""
        assert queries.stride(1) == 1, "operators take queries whose components are contiguous"
        outputs = torch.empty(queries.shape)
        arguments = self.attention_arguments(batch)
        arguments.queries, arguments.query_stride = queries.data_ptr(), queries.stride(0)
        arguments.outputs = outputs.data_ptr()
        if sinks is not None:
            assert sinks.dtype == torch.float32, "operators take sinks as wide as scores"
            arguments.sinks = sinks.data_ptr()
        arguments.page_table, arguments.table_width = page_table_of(batch)
        arguments.key_scales, arguments.value_scales = scales_of(layer)
        self._library.attend(
            ctypes.byref(arguments), layer.keys.data_ptr(), layer.values.data_ptr(), ELEMENT_TYPES[layer.keys.dtype]
        )
        return outputs

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.attend(self.store(qkv, layer, norms, batch), layer, batch, sinks)

    def store_arguments(self, batch: ForwardBatch) -> StoreArguments:
        """Return the arguments of a store that all layers of this shape share."""
        shape = self.shape
        return StoreArguments(
            positions=batch.positions.data_ptr(),
            tokens=batch.positions.shape[0],
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            threads=self._threads,
        )

    def attention_arguments(self, batch: ForwardBatch) -> AttentionArguments:
        """Return the arguments of attention that all layers of this shape share."""
        shape = self.shape
        return AttentionArguments(
            query_starts=batch.query_starts.data_ptr(),
            key_lengths=batch.key_lengths.data_ptr(),
            blocks=None if batch.blocks is None else batch.blocks.data_ptr(),
            block_count=0 if batch.blocks is None else len(batch.blocks),
            rows=batch.rows,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            threads=self._threads,
            window_left=-1 if shape.window_left is None else shape.window_left,
            is_chunked=shape.is_chunked,
            scale=shape.scale,
            softcap=shape.attention_softcap or 0.0,
        )


def page_table_of(batch: ForwardBatch) -> tuple[int, int]:
    """Return where the page table begins, and its width."""
    assert batch.page_table.is_contiguous(), "operators take contiguous page tables"
    return batch.page_table.data_ptr(), batch.page_table.shape[1]


def scales_of(layer: KvLayer) -> tuple[int | None, int | None]:
    """Return where the scales of keys and of values are, if they have some."""
    scales = layer.scales
    return (None, None) if scales is None else (scales.keys.data_ptr(), scales.values.data_ptr())


def fits(library: CpuLibrary, shape: AttentionShape) -> bool:
    """Return whether the operators can serve heads of `shape`: they work on whole vector registers."""
    return (
        shape.latent_dim is None
        and shape.head_dim % library.lanes == 0
        and shape.page_size % library.lanes == 0
        and shape.head_dim <= library.max_head_dim
    )
