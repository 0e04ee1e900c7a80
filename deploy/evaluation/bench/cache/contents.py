"""Fast generation of token ids for segments, so that its time does not affect measurements of the cache."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.types import TokenIds
    from deploy.evaluation.bench.records import Segment

LARGEST_SEGMENT = 1 << 17
_SPAN = (1 << 31) - LARGEST_SEGMENT


class Contents:
    """Maps each segment to ascending ids that start at a hash of its key.

    Segments with equal keys have a common prefix; others differ from their first token on. A radix tree only compares
    ids, so real text is not needed.
    """

    def __init__(self) -> None:
        self._ascending = np.arange(LARGEST_SEGMENT, dtype=np.int32)

    def ids(self, segments: Iterable[Segment]) -> TokenIds:
        """Return the ids of a prompt, [tokens] int32.

        Raises:
            ValueError: a segment is longer than `LARGEST_SEGMENT`.
        """
        return np.concatenate([self._segment(segment) for segment in segments])

    def _segment(self, segment: Segment) -> TokenIds:
        if segment.tokens > LARGEST_SEGMENT:
            raise ValueError(
                f"segment {segment.key} has {segment.tokens} tokens; at most {LARGEST_SEGMENT} are supported"
            )
        start = int.from_bytes(blake2b(segment.key.encode(), digest_size=8).digest(), "little") % _SPAN
        return self._ascending[: segment.tokens] + np.int32(start)
