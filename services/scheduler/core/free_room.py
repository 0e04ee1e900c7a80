"""Room that a group has for further requests, by which tokenizers choose among groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.types import EXPECTED_OUTPUT_TOKENS

if TYPE_CHECKING:
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.queue import ClassQueues
    from services.scheduler.core.rows import RowSlots

# A report changes only with such a part of the memory, so that it is not sent for each page.
PARTS = 64


def free_tokens(memory: KvMemory, rows: RowSlots, waiting: ClassQueues) -> int:
    """Return for how many tokens of KV there is room, in whole 64ths of the device's pages; 0 if it is short.

    Running rows and `waiting` sequences are expected to generate `EXPECTED_OUTPUT_TOKENS` more, or as many as they may.
    What only the cache holds counts as room, so the result depends on open requests alone: it reveals nothing of what
    earlier ones have left in the cache.
    """
    page_size = rows.page_size
    part = max(1, memory.allocator.capacity // PARTS) * page_size
    reserved = 0
    if memory.loads is not None:
        reserved = sum(each.remote.held_pages for each in memory.loads.reserved if each.remote is not None)
    free = (memory.room_for_requests + reserved) * page_size - _growth(rows) - waiting.expected_tokens
    return max(0, free // part) * part


def _growth(rows: RowSlots) -> int:
    """Return the tokens for which running rows are expected to need further pages."""
    running = np.flatnonzero(rows.occupied)
    expected = np.minimum(rows.length[running] + EXPECTED_OUTPUT_TOKENS, rows.limit[running] + 1)
    return int(np.maximum(expected - rows.page_count[running] * rows.page_size, 0).sum())
