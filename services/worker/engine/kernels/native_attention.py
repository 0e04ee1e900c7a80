"""Attention by the compiled operators, straight from the pages."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.interface import AttentionShape, HeadNorms, KvLayer, KvLayout
from services.worker.engine.kernels.native_library import (
    ELEMENT_TYPES,
    AttentionArguments,
    NativeLibrary,
    StoreArguments,
)

if TYPE_CHECKING:
    from services.worker.engine.model.batch import ForwardBatch


class NativeAttention:
    """Reads keys and values where they lie; KV may be float32, float16 or bfloat16, sums are float32."""

    layout = KvLayout.LANES

    def __init__(self, library: NativeLibrary, shape: AttentionShape, rotary: torch.Tensor, threads: int) -> None:
        """Serve heads of `shape`, which `fits` accepted; `rotary` is `rotary_table`'s."""
        assert fits(library, shape), "head_dim and page_size were checked before"
        self._library = library
        self._shape = shape
        self._angles = rotary.contiguous()
        self._threads = threads

    def store(self, qkv: torch.Tensor, layer: KvLayer, norms: HeadNorms | None, batch: ForwardBatch) -> torch.Tensor:
        """Rotate, write keys and values, return queries; see `AttentionBackend.store`."""
        assert qkv.is_contiguous(), "operators take contiguous activations"
        shape = self._shape
        arguments = StoreArguments(
            qkv=qkv.data_ptr(),
            angles=self._angles.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.write_slots.data_ptr(),
            query_norm=norms.query.data_ptr() if norms else None,
            key_norm=norms.key.data_ptr() if norms else None,
            epsilon=norms.epsilon if norms else 0.0,
            tokens=qkv.shape[0],
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            threads=self._threads,
        )
        self._library.store(
            ctypes.byref(arguments), layer.keys.data_ptr(), layer.values.data_ptr(), ELEMENT_TYPES[layer.keys.dtype]
        )
        return qkv[:, : shape.query_width]

    def attend(self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch) -> torch.Tensor:
        """Attend over cached and new tokens; see `AttentionBackend.attend`."""
        assert queries.stride(1) == 1, "operators take queries whose components are contiguous"
        assert batch.page_table.is_contiguous(), "operators take contiguous page tables"
        shape = self._shape
        outputs = torch.empty(queries.shape)
        arguments = AttentionArguments(
            queries=queries.data_ptr(),
            outputs=outputs.data_ptr(),
            query_starts=batch.query_starts.data_ptr(),
            key_lengths=batch.key_lengths.data_ptr(),
            page_table=batch.page_table.data_ptr(),
            query_stride=queries.stride(0),
            rows=batch.rows,
            table_width=batch.page_table.shape[1],
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            threads=self._threads,
            window_left=-1 if shape.window_left is None else shape.window_left,
            scale=shape.scale,
        )
        self._library.attend(
            ctypes.byref(arguments), layer.keys.data_ptr(), layer.values.data_ptr(), ELEMENT_TYPES[layer.keys.dtype]
        )
        return outputs

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, norms: HeadNorms | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """Do one after the other."""
        return self.attend(self.store(qkv, layer, norms, batch), layer, batch)


def fits(library: NativeLibrary, shape: AttentionShape) -> bool:
    """Return whether the operators can serve heads of `shape`: they work on whole vector registers."""
    return (
        shape.score_cap is None
        and shape.head_dim % library.lanes == 0
        and shape.page_size % library.lanes == 0
        and shape.head_dim <= library.max_head_dim
    )
