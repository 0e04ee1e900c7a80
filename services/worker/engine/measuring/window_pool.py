"""How memory is divided between the pages of all tokens and those of the newest: pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.engine.measuring.capacity import count_pages

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.measuring.capacity import MemoryMeasure

# The number of pages of each pool depends on the other's; a few rounds settle it.
_ROUNDS = 8


def has_window_pool(spec: EngineSpec, is_local: tuple[bool, ...]) -> bool:
    """Whether layers with a window get pages of their own.

    That takes layers of both kinds. A host tier copies pages of all layers, so it does without.
    """
    return spec.window_ratio > 0 and any(is_local) and not all(is_local) and not (spec.host_bytes or spec.host_pages)


def count_window_pages(spec: EngineSpec, pages: int, window: int) -> int:
    """Return how many pages the layers with a window get beside `pages` of the others.

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
        pages = count_pages(spec, context, full + round(local * share), reserve, memory)
        window_pages = count_window_pages(spec, pages, window)
        if window_pages <= pages * share + 1:
            break
        share = window_pages / pages
    return pages, window_pages
