from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.patterns import MAX_SPAN, PatternMatch, PatternMatcher, compile_pattern
from tests.examples import examples

LITERALS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", "ab"])


def _more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "{0,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    )


PATTERNS = st.recursive(LITERALS, _more, max_leaves=6)


def expected(pattern: str, text: str) -> PatternMatch | None:
    """Search all substrings with Python's own engine: the first end, and for it the first start."""
    whole = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if whole.fullmatch(text, start, end):
                return PatternMatch(start, end)
    return None


def find(pattern: str, text: str) -> PatternMatch | None:
    matcher = PatternMatcher(compile_pattern(pattern))
    return next((match for character in text if (match := matcher.step(character)) is not None), None)


@examples(200)
@given(PATTERNS, st.text("abc1\n", max_size=12))
@example("a.*b|ab", "acccb")
@example("(?:ab|b)c", "abc")
def test_finds_the_same_match_as_a_search_of_all_substrings(pattern: str, text: str) -> None:
    if re.fullmatch(pattern, ""):
        with pytest.raises(InvalidRequestError, match="empty text"):
            compile_pattern(pattern)
    else:
        assert find(pattern, text) == expected(pattern, text)


@examples(100)
@given(PATTERNS.filter(lambda pattern: not re.fullmatch(pattern, "")), st.text("abc1", max_size=10))
def test_a_match_never_begins_in_released_text(pattern: str, text: str) -> None:
    matcher = PatternMatcher(compile_pattern(pattern))
    released = 0
    for count, character in enumerate(text, start=1):
        match = matcher.step(character)
        if match is not None:
            assert match.start >= released
            return
        released = count - matcher.pending
        assert 0 <= matcher.pending <= count


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1",
        "(?=a)b",
        "(?<!a)b",
        "^a",
        "a$",
        r"\bword",
        "(?i)a",
        "(?i:a)",
        "a(",
        "[",
        "",
        "a*",
        "x" * 600,
        "(?:a{99}){99}",
        "(?>a)",
        "a++",
    ],
)
def test_unsupported_and_invalid_patterns_are_refused_with_the_parameter_s_name(pattern: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        compile_pattern(pattern)
    assert refused.value.param == "stop_regex"


def test_expressions_that_kill_backtracking_engines_take_linear_time() -> None:
    matcher = PatternMatcher(compile_pattern("(?:a+)+b"))
    started = time.process_time()
    for _ in range(3000):
        assert matcher.step("a") is None
    assert time.process_time() - started < 2.0
    assert matcher.step("b") is not None


def test_pending_text_is_bounded() -> None:
    matcher = PatternMatcher(compile_pattern("(?s)a.*b"))
    for _ in range(MAX_SPAN + 500):
        matcher.step("a")
        assert matcher.pending <= MAX_SPAN


@pytest.mark.parametrize("pattern", ["(?:a?){100}b", "(?:[ab]|a|(?:a|b)?){30}c", f"[{'x' * 200}a]{{90}}b"])
def test_the_worst_patterns_cost_little_for_a_character(pattern: str) -> None:
    matcher = PatternMatcher(compile_pattern(pattern))
    started = time.process_time()
    for _ in range(1000):
        matcher.step("a")
    assert time.process_time() - started < 3.0
