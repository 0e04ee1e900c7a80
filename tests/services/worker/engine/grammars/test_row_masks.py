"""What a bound row samples depends on its seed and its ids alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.grammars import Grammar, GrammarKind
from services.worker.engine.grammars.matcher import mask_words
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.plans.rows import RowStates
from tests.fakes.grammar_library import FakeLibrary
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import (
    EOS,
    VOCABULARY_SIZE,
    Rows,
    bound_row,
    finished,
    schema_grammar,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from services.worker.engine.grammars.matcher import Mask
    from services.worker.engine.grammars.row_masks import FollowsOutput

ORDER = schema_grammar(CORPUS["order"])
LISTS = schema_grammar(CORPUS["array of arrays"])


def test_the_output_does_not_depend_on_other_rows() -> None:
    [alone] = finished([bound_row(0, ORDER, seed=4)])
    together = finished(
        [
            bound_row(0, LISTS, seed=1),
            bound_row(1, None, seed=2, length=40),
            bound_row(2, ORDER, seed=4),
            bound_row(3, ORDER, seed=5),
        ]
    )
    assert together[2] == alone
    assert together[3] != alone


def test_rows_without_a_grammar_are_as_without_those_that_have_one() -> None:
    [alone] = finished([bound_row(0, None, seed=2, length=30)])
    assert finished([bound_row(1, ORDER, seed=4), bound_row(0, None, seed=2, length=30)])[1] == alone


@pytest.mark.parametrize("kept", [0, 1, 7, 20])
def test_equal_after_a_retraction_or_in_another_process(kept: int) -> None:
    [whole] = finished([bound_row(0, ORDER, seed=4)])
    rows = Rows([bound_row(0, ORDER, seed=4)])
    for _ in range(kept):
        rows.step()
    before = rows.output(rows.running[0])
    assert before == whole[:kept]
    rows.close(rows.running[0])
    rows.open(bound_row(5, LISTS, seed=9))
    again = bound_row(0, ORDER, seed=4, more=before)
    rows.open(again)
    while again in rows.running:
        rows.step()
    assert rows.output(again) == whole


def test_a_row_ends_with_eos_once_its_grammar_is_complete() -> None:
    rows = Rows([bound_row(0, Grammar(GrammarKind.REGEX, "[0-9]{6}", "regex"), seed=1)])
    opened = rows.running[0]
    while rows.running:
        rows.step()
    assert rows.rows.token_ids[0, rows.rows.lengths[0] - 1] == EOS
    assert len(text_of(rows.output(opened))) == 6


def test_a_slot_forgets_its_last_tenant() -> None:
    rows = Rows([bound_row(0, ORDER, seed=4)])
    rows.step()
    rows.close(rows.running[0])
    free = bound_row(0, None, seed=2, length=30)
    rows.open(free)
    while rows.running:
        rows.step()
    assert [rows.output(free)] == finished([bound_row(0, None, seed=2, length=30)])


class Walk:
    """A matcher that allows one token after the other, and then nothing."""

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.is_terminated = False

    def accept(self, token_id: int) -> bool:
        return bool(self.path) and self.path.pop(0) == token_id

    def mask(self) -> Mask:
        bits = np.zeros(mask_words(VOCABULARY_SIZE) * 32, np.uint8)
        bits[self.path[:1]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def spelling(self, mask: Mask) -> None:
        return None


class Library(FakeLibrary):
    threads = 2

    def __init__(self, path: list[int]) -> None:
        self.path = path

    def matcher(self, grammar: Grammar) -> Walk:
        return Walk(list(self.path))


def allowed(masks: RowMasks, rows: RowStates) -> list[int]:
    bits = np.unpackbits(masks.masks(np.array([0]), rows).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def table_of(masks: RowMasks, *more: int) -> RowStates:
    rows = RowStates(1, 64, 16)
    opened = bound_row(0, ORDER, seed=1, length=40, more=more)
    rows.open(opened)
    masks.open(opened)
    return rows


def test_where_nothing_is_allowed_the_row_ends(caplog: pytest.LogCaptureFixture) -> None:
    masks = RowMasks(Library([100, 101]), VOCABULARY_SIZE)
    rows = table_of(masks, 100)
    assert allowed(masks, rows) == [101]
    rows.append_tokens(np.array([0]), np.array([101], np.int32))
    with caplog.at_level(logging.WARNING):
        assert allowed(masks, rows) == [EOS]
    assert "it ends there" in caplog.text


def test_ids_that_the_grammar_does_not_allow_end_the_row() -> None:
    masks = RowMasks(Library([100, 101]), VOCABULARY_SIZE)
    assert allowed(masks, table_of(masks, 7)) == [EOS]


def test_a_row_whose_masks_take_too_long_ends() -> None:
    seconds = iter(range(100))
    masks = RowMasks(Library([100, 101, 102, 103]), VOCABULARY_SIZE, clock=lambda: next(seconds) * 0.7)
    rows = table_of(masks)
    assert allowed(masks, rows) == [100]
    rows.append_tokens(np.array([0]), np.array([100], np.int32))
    assert allowed(masks, rows) == [101]
    assert allowed(masks, rows) == [EOS]


class Slow:
    """Time in which nothing passes but while a matcher of `path` computes its mask: alone or with others."""

    def __init__(self, path: list[int], seconds: float) -> None:
        self.now = 0.0
        self.path = path
        self.seconds = seconds
        self.slow_ids = set(path)
        # Lines of each call.
        self.together: list[list[int]] = []

    def library(self) -> Library:
        outer = self

        class SlowWalk(Walk):
            def mask(self) -> Mask:
                if outer.slow_ids.intersection(self.path[:1]):
                    outer.now += outer.seconds
                return super().mask()

        class Slowly(Library):
            def matcher(self, grammar: Grammar) -> Walk:
                return SlowWalk(outer.path[:] if grammar == LISTS else list(self.path))

            def fill(self, matchers: Sequence[FollowsOutput], masks: NDArray[np.int32], lines: Sequence[int]) -> None:
                outer.together.append(list(lines))
                super().fill(matchers, masks, lines)

        return Slowly(list(range(100, 110)))


def outputs(slow: Slow, steps: int) -> list[list[int]]:
    """Return the first tokens that an ordinary row and a slow one may sample, in each of some passes."""
    masks = RowMasks(slow.library(), VOCABULARY_SIZE, clock=lambda: slow.now, wall=lambda: slow.now)
    rows = RowStates(2, 64, 16)
    for opened in (bound_row(0, ORDER, seed=1, length=40), bound_row(1, LISTS, seed=1, length=40)):
        rows.open(opened)
        masks.open(opened)
    seen: list[list[int]] = []
    for step in range(steps):
        bits = np.unpackbits(masks.masks(np.array([0, 1]), rows).view(np.uint8), axis=1, bitorder="little")
        seen.append([int(np.flatnonzero(line)[0]) for line in bits])
        rows.append_tokens(np.array([0, 1]), np.array([100 + step, slow.path[step]], np.int32))
    return seen


def test_a_row_that_holds_up_the_others_is_computed_apart_and_ends() -> None:
    slow = Slow([200, 201, 202, 203, 204], seconds=0.4)
    seen = outputs(slow, 5)
    assert [first for first, _ in seen] == [100, 101, 102, 103, 104]
    assert [second for _, second in seen] == [200, 201, 202, EOS, EOS]
    assert slow.together == [[0, 1], [0], [0], [0], [0]]
    # Twice in the first pass.
    assert slow.now == pytest.approx(4 * 0.4)


def test_a_row_that_holds_up_the_others_now_and_then_is_charged_each_time() -> None:
    slow = Slow([200, 300] * 4, seconds=0.4)
    slow.slow_ids = {200}
    seen = outputs(slow, 8)
    assert [second for _, second in seen] == [200, 300, 200, 300, 200, EOS, EOS, EOS]
    # It was computed with the other one in passes after quick ones.
    assert slow.together == [[0, 1], [0], [0, 1], [0], [0, 1], [0], [0], [0]]


def test_a_row_that_has_ended_may_take_part_once_more() -> None:
    class Ended(Walk):
        is_terminated = True

        def __init__(self, path: list[int]) -> None:
            self.path = path

    class Endings(Library):
        def matcher(self, grammar: Grammar) -> Walk:
            return Ended([])

    masks = RowMasks(Endings([]), VOCABULARY_SIZE)
    assert len(allowed(masks, table_of(masks))) == mask_words(VOCABULARY_SIZE) * 32


def test_a_row_whose_grammar_is_missing_may_only_end() -> None:
    class Empty(Library):
        def matcher(self, grammar: Grammar) -> Walk | None:  # type: ignore[override]
            return None

    masks = RowMasks(Empty([]), VOCABULARY_SIZE)
    rows = table_of(masks, 100)
    assert allowed(masks, rows) == [EOS]
    assert masks.forced(0, EOS, 4, rows) == []
