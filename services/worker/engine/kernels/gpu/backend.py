"""The family of GPU kernels; this folder is the only place that imports Triton and FlashInfer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.gpu.attention import ChunkAttention, GpuAttention, TorchChunkAttention
from services.worker.engine.kernels.gpu.flashinfer_products import FlashInferProducts
from services.worker.engine.kernels.gpu.kernels import GpuKernels
from services.worker.engine.kernels.gpu.latent_attention import GpuLatentAttention
from services.worker.engine.kernels.gpu.libraries import has_flashinfer
from services.worker.engine.kernels.gpu.ordered_attention import OrderedAttention
from services.worker.engine.kernels.gpu.ordered_kernels import OrderedKernels
from services.worker.engine.kernels.gpu.prebuild import LATENT_DIMS, is_latent_missing, is_missing

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import AttentionBackend, AttentionShape, Kernels

log = logging.getLogger(__name__)

# Head sizes for which FlashInfer compiles its kernels.
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_HOPPER = (9, 0)


class GpuBackend:
    """Triton programs, torch's matrix products, FlashInfer for chunks and products with FP8 in blocks."""

    name = "gpu"

    def __init__(
        self, dtype: torch.dtype, device: torch.device, max_rows: int, *, is_deterministic: bool = False
    ) -> None:
        """Compute in `dtype` on `device`, with at most `max_rows` rows that decode.

        If it `is_deterministic`, only programs whose sums have one order are used; see `engine/determinism.py`.
        """
        self._products: FlashInferProducts | None = None
        if not is_deterministic and has_flashinfer_products(dtype, device):
            self._products = FlashInferProducts(device)
        self.kernels: Kernels = (
            OrderedKernels(dtype, device) if is_deterministic else GpuKernels(dtype, device, self._products)
        )
        self._is_deterministic = is_deterministic
        self._dtype = dtype
        self._device = device
        self._max_rows = max_rows

    def prepare(self, most_tokens: int) -> None:
        """Have FlashInfer's products compiled."""
        if self._products is not None:
            self._products.prepare(most_tokens)

    def attention(self, shape: AttentionShape, rotary: torch.Tensor) -> AttentionBackend:
        """Return the attention for one model shape."""
        if self._is_deterministic:
            return OrderedAttention(shape, rotary, self._max_rows)
        if shape.latent_dim is not None:
            return GpuLatentAttention(shape, rotary, self._latent_chunks(shape), self._max_rows)
        return GpuAttention(shape, rotary, self._chunk_attention(shape), self._max_rows)

    def _chunk_attention(self, shape: AttentionShape) -> ChunkAttention:
        if not has_flashinfer():
            log.warning(
                "FlashInfer is not installed, prompts are computed slower; install it: pip install flashinfer-python"
            )
            return TorchChunkAttention(shape)
        if shape.head_dim not in _FLASHINFER_HEAD_DIMS:
            log.warning("FlashInfer has no kernels for head_dim %d, prompts are computed slower", shape.head_dim)
            return TorchChunkAttention(shape)
        if shape.is_chunked and shape.window_left is not None and (shape.window_left + 1) % shape.page_size:
            log.warning(
                "FlashInfer attends to whole pages, chunks of %d tokens are no multiples of page_size %d: prompts are "
                "computed slower", shape.window_left + 1, shape.page_size
            )  # fmt: skip
            return TorchChunkAttention(shape)
        capability = torch.cuda.get_device_capability(self._device)
        # Chunked attention is full attention of each part to FlashInfer.
        has_window = shape.window_left is not None and not shape.is_chunked
        has_cap = shape.attention_softcap is not None
        if is_missing(
            shape.head_dim, self._dtype, has_window=has_window, has_cap=has_cap, has_float8_kv=shape.has_float8_kv,
            capability=capability,
        ):  # fmt: skip
            log.warning(
                "FlashInfer's kernels for head_dim %d are not here and cannot be compiled, prompts take longer; "
                "put CUDA's nvcc on the path or into CUDA_HOME, or build an image with them", shape.head_dim
            )  # fmt: skip
            return TorchChunkAttention(shape)
        from services.worker.engine.kernels.gpu.flashinfer_prefill import FlashInferPrefill

        return FlashInferPrefill(shape, self._device)

    def _latent_chunks(self, shape: AttentionShape) -> ChunkAttention | None:
        """Return FlashInfer's kernels of latent attention; None: they do not serve this shape, or are not here."""
        if not has_flashinfer():
            return None
        sizes = (shape.value_dim, shape.head_dim - shape.value_dim)
        if sizes != LATENT_DIMS:
            log.warning("FlashInfer has kernels for latent attention of %s, not %s", LATENT_DIMS, sizes)
            return None
        if is_latent_missing(self._dtype, capability=torch.cuda.get_device_capability(self._device)):
            log.warning("FlashInfer's kernels for latent attention are not here and cannot be compiled")
            return None
        from services.worker.engine.kernels.gpu.flashinfer_latent import FlashInferLatent

        return FlashInferLatent(shape, self._device)


def has_flashinfer_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashInfer is installed, and has products with FP8 in blocks for such a GPU and inputs of `dtype`."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER
    return is_hopper and dtype == torch.bfloat16 and has_flashinfer()
