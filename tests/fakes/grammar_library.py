"""A library of grammars without compiled ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from common.grammars import Grammar
    from services.worker.engine.grammars.row_masks import FollowsOutput
    from services.worker.engine.grammars.vocabulary_source import VocabularySource


class FakeLibrary:
    """Stands in for `GrammarLibrary`; a subclass has a `matcher` of its own."""

    threads = 1

    def serve(self, source: VocabularySource) -> None:
        pass

    def begin(self, grammar: Grammar) -> None:
        pass

    def fill(self, matchers: Sequence[FollowsOutput], masks: NDArray[np.int32], lines: Sequence[int]) -> None:
        for matcher, line in zip(matchers, lines, strict=True):
            masks[line] = matcher.mask()
