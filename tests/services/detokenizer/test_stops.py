from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.stops import StopAutomaton, StopMatcher
from tests.examples import examples

texts = st.text(alphabet="abc", max_size=40)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4)


def expected_end(text: str, stops: list[str], first: int = 0) -> tuple[int, str] | None:
    """Search the whole text: the end of the earliest-ending match after `first` characters, and the longest there."""
    for end in range(first + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return end, max(matches, key=len)
    return None


def cut(text: str, sizes: list[int]) -> list[str]:
    """Cut a text into pieces of the given sizes, over and over."""
    pieces, position, index = [], 0, 0
    while position < len(text):
        size = max(sizes[index % len(sizes)], 1)
        pieces.append(text[position : position + size])
        position, index = position + size, index + 1
    return pieces


@examples(200)
@given(text=texts, stops=stop_lists, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), include=st.booleans())
def test_equals_a_search_of_the_whole_text(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    matcher, shown = StopMatcher(StopAutomaton(stops), include_stop_text=include), ""
    for piece in cut(text, sizes):
        shown += matcher.feed(piece, armed=True)
        if matcher.matched is not None:
            break
    found = expected_end(text, stops)
    if found is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        end, stop = found
        assert matcher.matched == stop
        assert shown == text[: end if include else end - len(stop)]


@examples(150)
@given(text=texts, stops=stop_lists, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_holds_back_exactly_the_text_that_may_become_a_stop_string(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher, fed, shown = StopMatcher(StopAutomaton(stops), include_stop_text=False), "", ""
    for piece in cut(text, sizes):
        fed += piece
        shown += matcher.feed(piece, armed=True)
        if matcher.matched is not None:
            break
        beginnings = [stop[:size] for stop in stops for size in range(1, len(stop)) if fed.endswith(stop[:size])]
        assert len(fed) - len(shown) == max(map(len, beginnings), default=0)


@examples(150)
@given(text=texts, stops=stop_lists, unarmed=st.integers(0, 20))
def test_matches_count_only_once_armed(text: str, stops: list[str], unarmed: int) -> None:
    matcher, shown = StopMatcher(StopAutomaton(stops), include_stop_text=False), ""
    for index, character in enumerate(text):
        shown += matcher.feed(character, armed=index >= unarmed)
        if matcher.matched is not None:
            break
    found = expected_end(text, stops, first=unarmed)
    if found is None:
        assert shown + matcher.flush() == text
    else:
        end, stop = found
        assert (matcher.matched, shown) == (stop, text[: end - len(stop)])


def test_an_unarmed_match_is_not_held_back() -> None:
    matcher = StopMatcher(StopAutomaton(["END", "ND"]), include_stop_text=False)
    assert matcher.feed("the END", armed=False) == "the END"


def test_empty_stop_strings_never_match() -> None:
    matcher = StopMatcher(StopAutomaton(["", "x"]), include_stop_text=False)
    assert matcher.feed("abc", armed=True) == "abc"
    assert matcher.matched is None


def test_stop_strings_of_several_bytes_match_across_pieces() -> None:
    matcher = StopMatcher(StopAutomaton(["。终"]), include_stop_text=False)
    assert [matcher.feed(piece, armed=True) for piece in ("好。", "。", "终了")] == ["好", "。", ""]
    assert matcher.matched == "。终"


class CountingAutomaton(StopAutomaton):
    """An automaton that counts how often it looks up a character."""

    __slots__ = ("lookups",)

    def __init__(self, stops: list[str]) -> None:
        self.lookups = 0
        super().__init__(stops)
        self.nexts = [Counted(self, nexts) for nexts in self.nexts]


class Counted(dict[str, int]):
    def __init__(self, automaton: CountingAutomaton, nexts: dict[str, int]) -> None:
        super().__init__(nexts)
        self._automaton = automaton

    def __contains__(self, key: object) -> bool:
        self._automaton.lookups += 1
        return super().__contains__(key)


@pytest.mark.parametrize("length", [1000, 4000])
def test_effort_is_linear_on_text_that_always_almost_matches(length: int) -> None:
    automaton = CountingAutomaton(["a" * 200 + "b", "aa" * 50 + "c"])
    matcher = StopMatcher(automaton, include_stop_text=False)
    for _ in range(length):
        matcher.feed("a", armed=True)
    assert automaton.lookups <= 3 * length
