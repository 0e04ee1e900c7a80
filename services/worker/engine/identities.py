"""Digests of all that KV and embeddings depend on: equal ones may be exchanged between processes."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from common.steps import EngineSpec
    from services.worker.engine.kernels.interface import KvScales
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.shards import Span
    from services.worker.engine.vision.config import VisionConfig


@dataclass(frozen=True, slots=True)
class KvTraits:
    """All that decides about KV but the weights and the ranks that share them."""

    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: str
    page_size: int
    vision: VisionConfig | None
    is_quantised: bool
    has_ordered_sums: bool = False
    """Whether a GPU's kernels are those of `model.deterministic`, which give other bits than its usual ones."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The traits as texts."""
        return (
            str(asdict(self.config)), str(self.dtype), str(self.kv_dtype), self.layout, str(self.is_quantised),
            str(self.vision and asdict(self.vision)), str(self.page_size),
            # Without, texts are those of earlier versions.
            *(["ordered sums"] if self.has_ordered_sums else []),
        )  # fmt: skip


def scaled_identity(weights: str, scales: Sequence[KvScales]) -> str:
    """Return the identity of weights, together with the scales of KV in FP8, if there are any."""
    if not scales:
        return weights
    values = [(layer.keys.tolist(), layer.values.tolist()) for layer in scales]
    return hashlib.sha256(f"{weights}\n{values}".encode()).hexdigest()


def fingerprint(weights: str, traits: KvTraits, spec: EngineSpec, kv_heads: Span, layers: Span) -> str:
    """Return the digest of all that decides about the KV of a rank; `weights` are those of all ranks."""
    return _digest(
        weights, *traits.parts, str(kv_heads), f"{spec.rank}/{spec.world_size}", f"{layers.start}-{layers.stop}",
        # Sums in another order give other bits; without, fingerprints are those of earlier versions.
        *(["whole experts"] if spec.has_whole_experts else []),
    )  # fmt: skip


def kv_identity(weights: str, traits: KvTraits, *, whole_experts: bool) -> str:
    """Return the digest of all that decides about KV but the number of ranks."""
    return _digest(weights, *traits.parts, str(whole_experts))


def encoder_identity(weights: str, config: VisionConfig, dtype: torch.dtype) -> str:
    """Return the digest of all that decides about the embeddings of images."""
    return _digest(weights, str(asdict(config)), str(dtype))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
