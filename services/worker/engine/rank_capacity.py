"""Capacity of a loaded model, and digests of all that its KV and embeddings depend on, as a rank reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.steps import EngineCapacity
from services.worker.engine.checkpoints.replacing import identity_by_samples
from services.worker.engine.identities import KvTraits, encoder_identity, fingerprint, kv_identity, scaled_identity
from services.worker.engine.kernels.cpu.backend import CpuBackend
from services.worker.engine.quantization.policy import quantiser

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import KvLayout
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.rank_model import RankModel


def decoder_capacity(
    rank: RankModel, pool: KvPool, pages: int, context: int, layout: KvLayout, group: RankGroup
) -> EngineCapacity:
    """Return the capacity of a decoder with `pages` granted pages in `pool`; all ranks ask at the same time."""
    spec, config, memory = rank.spec, rank.config, rank.memory
    return EngineCapacity(
        device_pages=pages,
        page_size=spec.page_size,
        max_context=context,
        vocabulary_size=config.vocabulary_size,
        eos_token_ids=config.eos_token_ids,
        kv_bytes_per_token=pool.bytes_per_token,
        fingerprint=fingerprint_of(rank, layout, group),
        kv_identity=_kv_identity(rank, layout),
        device=str(rank.device),
        layers=config.layers,
        window_pool=memory.window_pool(pool),
        recurrent_states=memory.recurrent_states(pool.states.snapshots if pool.states else 0),
        head=rank.head.pooling if rank.head else None,
        only_pools=rank.head is not None or rank.only_embeds,
        sees_images=rank.vision is not None,
        embedding_bytes=rank.embedding_bytes,
        image_block=rank.vision.block if rank.vision is not None else 0,
        encoder_identity=_encoder_identity(rank),
        products=rank.backend.products.value if isinstance(rank.backend, CpuBackend) else "",
    )


def encoder_capacity(rank: RankModel) -> EngineCapacity:
    """Return the capacity of a rank that has the vision encoder, and not the decoder."""
    return EngineCapacity(
        device_pages=0,
        page_size=rank.spec.page_size,
        max_context=0,
        vocabulary_size=rank.config.vocabulary_size,
        eos_token_ids=(),
        kv_bytes_per_token=0,
        fingerprint="",
        device=str(rank.device),
        layers=0,
        embedding_bytes=rank.embedding_bytes,
        encoder_identity=_encoder_identity(rank),
    )


def fingerprint_of(rank: RankModel, layout: KvLayout, group: RankGroup) -> str:
    """Return the digest of all that decides about KV, with the weights of all ranks, which ask at the same time."""
    # A rank's KV depends on the weights of all ranks, as layers add up what all of them contribute.
    identity = scaled_identity(rank.checkpoint.identity(), rank.kv_scales)
    weights = "".join(group.gather_digests(identity))
    return fingerprint(weights, _traits(rank, layout), rank.spec, rank.shard.kv_heads, rank.layers)


def _traits(rank: RankModel, layout: KvLayout) -> KvTraits:
    spec = rank.spec
    return KvTraits(
        rank.config, rank.dtype, rank.kv_dtype, layout.value, spec.page_size, rank.vision,
        is_quantised=quantiser(spec, rank.config) is not None,
        has_ordered_sums=spec.deterministic and rank.backend.name == "gpu",
    )  # fmt: skip


def _kv_identity(rank: RankModel, layout: KvLayout) -> str:
    """Return the digest of all that decides about KV but the number of ranks; see `WorkerCapacity.kv_identity`."""
    spec = rank.spec
    if spec.stages > 1 or rank.kv_scales:
        return ""
    weights = rank.checkpoint.identity() if spec.load_format == "dummy" else identity_of_rank_files(rank)
    return kv_identity(weights, _traits(rank, layout), whole_experts=spec.has_whole_experts)


def identity_of_rank_files(rank: RankModel) -> str:
    """Return the identity of the model's weights by samples of its files."""
    return rank.files_identity or identity_by_samples(rank.spec.model)


def _encoder_identity(rank: RankModel) -> str:
    """Return the digest of all that decides about embeddings; see `WorkerCapacity.encoder_identity`."""
    if rank.vision is None:
        return ""
    weights = "" if rank.spec.load_format == "dummy" else identity_of_rank_files(rank)
    return encoder_identity(weights, rank.vision, rank.activation_dtype)
