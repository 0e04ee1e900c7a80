"""Latent attention of prefill chunks through FlashInfer's kernels for absorbed projections (Ye et al., MLSys 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from services.worker.engine.kernels.gpu.flashinfer_plans import PlanTurns
from services.worker.engine.kernels.gpu.flashinfer_prefill import WORKSPACE_BYTES, chunk_pages

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import AttentionShape, KvLayer
    from services.worker.engine.model.batch import ForwardBatch


class FlashInferLatent:
    """Plans once per batch, on the host, and runs the plan in every layer; see `ChunkAttention`."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """Serve heads of `shape`; kernels are compiled when they are first used."""
        self._shape = shape
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns = PlanTurns(lambda: BatchMLAPagedAttentionWrapper(workspace), device)
        self._wrapper: BatchMLAPagedAttentionWrapper | None = None
        self._planned: ForwardBatch | None = None

    def __call__(
        self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert sinks is None, "no model of latent attention has sinks"
        shape = self._shape
        if batch is not self._planned:
            chunks = chunk_pages(batch, shape.page_size)
            self._wrapper = self._turns.plan(
                lambda wrapper: wrapper.plan(
                    chunks.query_starts, chunks.page_starts, chunks.pages, chunks.key_lengths, shape.query_heads,
                    shape.value_dim, shape.head_dim - shape.value_dim, shape.page_size, True, shape.scale,
                    queries.dtype, layer.keys.dtype,
                )
            )  # fmt: skip
            self._planned = batch
        assert self._wrapper is not None, "it has planned"
        latent, rotated = layer.keys[:, :, 0].tensor_split([shape.value_dim], dim=-1)
        turned = queries[..., shape.value_dim :]
        self._wrapper.run(queries[..., : shape.value_dim], turned, latent, rotated, out=outputs)
