from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.stops import PatternStopMatcher, StopAutomaton, StopMatcher
from tests.examples import examples
from tests.services.detokenizer.test_stops import cut, stop_lists, texts

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def run(matcher: PatternStopMatcher | StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece, armed=True)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


@examples(100)
@given(texts, stop_lists, SIZES, st.booleans())
def test_stop_strings_work_the_same_with_and_without_patterns(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    pieces = cut(text, sizes)
    alone = run(StopMatcher(StopAutomaton(stops), include_stop_text=include), pieces)
    assert run(PatternStopMatcher(["z+"], stops, include_stop_text=include), pieces) == alone


@pytest.mark.parametrize("sizes", [[1], [2], [3], [100]])
def test_a_pattern_ends_the_text_however_it_is_cut(sizes: list[int]) -> None:
    pattern = r"Step [2-9]\."
    pieces = cut("Step 1. Step 2. Done", sizes)
    assert run(PatternStopMatcher([pattern], [], include_stop_text=False), pieces) == ("Step 1. ", pattern)
    assert run(PatternStopMatcher([pattern], [], include_stop_text=True), pieces) == ("Step 1. Step 2.", pattern)


def test_before_min_tokens_a_match_is_passed_over() -> None:
    matcher = PatternStopMatcher([r"\d\d"], [], include_stop_text=False)
    assert matcher.feed("12", armed=False) + matcher.feed(" a", armed=True) == "12 a"
    assert matcher.feed("34", armed=True) == ""
    assert matcher.matched == r"\d\d"
