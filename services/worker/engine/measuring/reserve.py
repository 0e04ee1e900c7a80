"""Memory that is kept free beside weights and KV: for passes, images and adapters."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from common.host import available_memory
from services.worker.engine.adapters.sites import adapter_bytes
from services.worker.engine.checkpoints.tensor_names import split_expert
from services.worker.engine.host_memory import return_freed_memory
from services.worker.engine.measuring.capacity import activation_reserve, sampler_bytes
from services.worker.engine.measuring.largest_pass import measured_pass
from services.worker.engine.parallel.stages import kept_bytes

if TYPE_CHECKING:
    from services.worker.engine.decoder_weights import LoadedDecoder

log = logging.getLogger(__name__)

# Memory on a GPU is kept for adapters of this rank, of all products, in all slots.
_RANK_OF_SLOTS = 16


def pass_bytes(decoder: LoadedDecoder, context: int) -> int:
    """Return bytes that passes take beside weights and KV: measured where a pass costs nothing, else estimated."""
    rank = decoder.rank
    spec, config, element_bytes = rank.spec, rank.config, rank.activation_dtype.itemsize
    # Embeddings of a pass and of images that it cuts in two stay beside what the pass computes.
    encoder = 0
    if decoder.vision is not None:
        encoder = decoder.vision.batch_bytes() + spec.kept_embeddings * rank.embedding_bytes
        encoder += 2 * spec.max_step_tokens * config.hidden_size * element_bytes
    # A rank may get the tokens of all groups that share experts.
    of_all = replace(spec, max_step_tokens=spec.max_step_tokens * spec.data_parallel_size)
    estimate = activation_reserve(of_all, config, element_bytes) + encoder
    if not rank.is_captured or spec.device_pages is not None:
        return estimate
    peak = measured_pass(decoder.model, spec, config, rank.memory, context) + encoder
    peak += kept_bytes(spec, config.hidden_size, element_bytes)
    log.info("model.measured activations_mib=%d estimated_mib=%d", peak >> 20, estimate >> 20)
    # The host's sampler copies logits; the device's has tables.
    return peak + 3 * spec.max_rows * config.vocabulary_size * 4 + sampler_bytes(spec.max_rows, config.vocabulary_size)


def slots_bytes(decoder: LoadedDecoder) -> int:
    """Return the bytes to keep for adapters in slots; on a CPU they stay where they were read.

    Not for factors of experts, which few adapters have, and of which there are many.
    """
    adapters, rank = decoder.adapters, decoder.rank
    if adapters is None or rank.device.type == "cpu":
        return 0
    sites = [site for site in adapters.sites if split_expert(f"{site.parts[0].module}.weight")[1] is None]
    each = adapter_bytes(sites, rank.config, _RANK_OF_SLOTS, rank.activation_dtype.itemsize)
    log.info("adapters.reserved slots=%d mib=%d", adapters.slots, adapters.slots * each >> 20)
    return adapters.slots * each


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device, after memory that nothing uses was returned to it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return_freed_memory()
    return available_memory()
