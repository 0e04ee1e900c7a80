"""Numbers of KV pages that fit, also beside a sliding-window KV pool: arithmetic over measured memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.model.config import ModelConfig


# Other processes need memory, too; a pool of this size holds 46,000 tokens of SmolLM2-135M.
_HOST_POOL_LIMIT = 2 * 1024**3
# Always free on a GPU, beside the configured fraction: CUDA graphs, libraries' buffers, gaps between blocks
# of the allocator, and other processes that grow a little.
_MARGIN = 768 * 1024**2
# Of recurrent states: one to continue from, and one that is being made.
LEAST_SNAPSHOTS = 2


@dataclass(frozen=True, slots=True)
class MemoryMeasure:
    """Bytes that were free on the device before the weights were loaded, and are now; `shared_by` ranks share them."""

    free_before: int
    free_now: int
    shared_by: int = 1
    is_host: bool = False


def longest_context(spec: EngineSpec, config: ModelConfig) -> int:
    """Return the tokens a row may have: the model's limit, or a smaller configured one."""
    return min(config.max_context, spec.max_context or config.max_context)


def count_pages(spec: EngineSpec, context: int, kv_bytes_per_token: int, reserve: int, memory: MemoryMeasure) -> int:
    """Return the number of pages to allocate.

    `spec.device_pages` is taken as it is. Otherwise weights and KV together take `spec.memory_fraction` of what was
    free, less `reserve` bytes for activations; on a host at most 2 GiB, and no more than all rows can fill. On a GPU
    some memory stays free even if all was asked for.

    Raises:
        ConfigurationError: not even one page fits.
    """
    if spec.device_pages is not None:
        pages = spec.device_pages
    else:
        used = memory.free_before - memory.free_now
        kept = max(
            memory.free_before - int(memory.free_before * spec.memory_fraction), 0 if memory.is_host else _MARGIN
        )
        # Memory that other processes have taken since counts as used, too.
        budget = memory.free_before - kept - used - reserve
        page_bytes = kv_bytes_per_token * spec.page_size
        pages = budget // memory.shared_by // page_bytes
        if memory.is_host:
            pages_by_rows = spec.max_rows * -(-context // spec.page_size)
            pages = min(pages, _HOST_POOL_LIMIT // page_bytes, pages_by_rows)
    if pages < 1:
        raise ConfigurationError(
            f"no memory for KV: {memory.free_now >> 20} MiB are free after loading, {reserve >> 20} MiB of them kept "
            f"for activations, and memory_fraction is {spec.memory_fraction}"
        )
    return pages


def activation_reserve(spec: EngineSpec, config: ModelConfig, element_bytes: int) -> int:
    """Return bytes to leave for the intermediate results of a full step and for logits with the sampler's copies."""
    columns = 4 * config.intermediate_size
    if config.moe is not None:
        each = 3 * config.moe.intermediate_size + 2 * config.hidden_size
        shared = 0 if config.moe.shared is None else 4 * config.moe.shared.intermediate_size
        columns = max(columns, config.moe.experts_per_token * each + shared)
    if config.recurrent is not None:
        # Queries, keys, values and products within blocks, in float32 and several times.
        heads = 16 * config.recurrent.value_heads * (config.recurrent.key_dim + config.recurrent.value_dim)
        columns = max(columns, heads)
    widest = 4 * config.hidden_size + columns + 3 * config.query_heads * config.head_dim
    return spec.max_step_tokens * widest * element_bytes + 4 * spec.max_rows * config.vocabulary_size * 4


def sampler_bytes(max_rows: int, vocabulary_size: int) -> int:
    """Return the bytes of a GPU sampler's tables for all rows: counts of tokens, processed logits, masks, short lists.

    155 + 155 + 15 + 2 MB at 256 rows and 151,936 tokens.
    """
    # Beside four bytes of count and of logit per token: a bit in each of three masks, and ids with their values.
    words = -(-vocabulary_size // 32)
    return (max_rows + 1) * (8 * vocabulary_size + 3 * 4 * words + 1024 * 8 + 128 * 8)


# The number of pages of each pool depends on the other's; a few rounds settle it.
_ROUNDS = 8


def has_window_pool(spec: EngineSpec, is_local: tuple[bool, ...]) -> bool:
    """Whether layers with a window get pages of their own.

    That takes layers of both kinds. A host tier copies pages of all layers, so it does without.
    """
    return spec.window_ratio > 0 and any(is_local) and not all(is_local) and not (spec.host_bytes or spec.host_pages)


def count_window_pages(spec: EngineSpec, pages: int, window: int) -> int:
    """Return the number of pages that the layers with a window get beside `pages` of the others.

    By the ratio that is asked for, but enough for the windows of all rows if that is no more than half as many as the
    others', and for one row with a whole step in any case; more than `pages` would never be used.
    """
    if spec.window_pages is not None:
        return spec.window_pages
    of_row = (window + spec.page_size) // spec.page_size + 2
    of_rows = min(spec.max_rows * of_row, pages // 2)
    of_step = of_row + -(-spec.max_step_tokens // spec.page_size)
    return min(max(round(pages * spec.window_ratio), of_rows, of_step), pages)


def divide(
    spec: EngineSpec, context: int, token_bytes: tuple[int, int], reserve: int, memory: MemoryMeasure, window: int
) -> tuple[int, int]:
    """Return the pages of both pools, which together take what one pool would.

    Args:
        spec: What is configured.
        context: Tokens that a row may have.
        token_bytes: KV of one token in the layers without and in those with a window.
        reserve: Bytes for activations.
        memory: What is free.
        window: Tokens that the layers with a window see.

    Raises:
        ConfigurationError: not even one page fits.
    """
    full, local = token_bytes
    share = spec.window_ratio
    for _ in range(_ROUNDS):
        bytes_of_both = full + round(local * share)
        pages = count_pages(spec, context, bytes_of_both, reserve, memory)
        window_pages = count_window_pages(spec, pages, window)
        if window_pages <= pages * share + 1:
            break
        share = window_pages / pages
    if spec.device_pages is None:
        # The rounds may end with a few pages more than fit.
        pages = min(pages, (pages * bytes_of_both - window_pages * local) // full)
    return pages, min(window_pages, pages)
