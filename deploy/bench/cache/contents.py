"""Token ids for segments, made so fast that the cache is measured and not they."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.types import TokenIds
    from deploy.bench.records import Segment

LARGEST_SEGMENT = 1 << 17
_SPAN = (1 << 31) - LARGEST_SEGMENT


class Contents:
    """Gives each segment a run of ascending ids from a place drawn by its key.

    Equal keys begin alike, different ones differ from their first token on. For a radix tree, which compares and does
    not interpret, that is as good as any text.
    """

    def __init__(self) -> None:
        """Draw nothing yet."""
        self._ascending = np.arange(LARGEST_SEGMENT, dtype=np.int32)

    def ids(self, segments: Iterable[Segment]) -> TokenIds:
        """Return [tokens] int32 of a prompt.

        Raises:
            ValueError: a segment is longer than `LARGEST_SEGMENT`.
        """
        return np.concatenate([self._segment(segment) for segment in segments])

    def _segment(self, segment: Segment) -> TokenIds:
        if segment.tokens > LARGEST_SEGMENT:
            raise ValueError(
                f"segment {segment.key} has {segment.tokens} tokens, at most {LARGEST_SEGMENT} are simulated"
            )
        start = int.from_bytes(blake2b(segment.key.encode(), digest_size=8).digest(), "little") % _SPAN
        return self._ascending[: segment.tokens] + np.int32(start)
