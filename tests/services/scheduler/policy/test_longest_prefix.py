from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.policies import LongestPrefixMatch
from tests.services.scheduler.policy.waiting import handles, waiting_sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.sequence import Sequence


def matches(lengths: dict[int, int]) -> Callable[[Sequence], int]:
    return lambda sequence: lengths.get(sequence.handle, 0)


def test_longest_match_goes_first_and_ties_by_arrival() -> None:
    waiting = [waiting_sequence(handle) for handle in range(5)]
    order = LongestPrefixMatch().order(waiting, matches({1: 16, 3: 64, 4: 16}))
    assert handles(order) == [3, 1, 4, 0, 2]


def test_only_the_window_is_matched_and_the_others_follow_by_arrival() -> None:
    matched: list[int] = []

    def match(sequence: Sequence) -> int:
        matched.append(sequence.handle)
        return sequence.handle

    waiting = [waiting_sequence(handle) for handle in range(6)]
    assert handles(LongestPrefixMatch(window=3).order(waiting, match)) == [2, 1, 0, 3, 4, 5]
    assert matched == [0, 1, 2]


def test_sequence_without_match_is_not_overtaken_beyond_its_patience() -> None:
    policy = LongestPrefixMatch(patience_s=5.0)
    old = waiting_sequence(0, arrived_at=10.0)
    lengths = matches({1: 64, 2: 128})
    soon = [old, waiting_sequence(1, arrived_at=14.0), waiting_sequence(2, arrived_at=15.0)]
    assert handles(policy.order(soon, lengths)) == [2, 1, 0]
    late = [old, waiting_sequence(1, arrived_at=14.0), waiting_sequence(2, arrived_at=15.1)]
    assert handles(policy.order(late, lengths)) == [0, 2, 1]


def test_empty_queue_has_an_empty_order() -> None:
    assert handles(LongestPrefixMatch().order([], matches({}))) == []


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 4)), max_size=30),
    st.integers(1, 8),
    st.floats(0, 10),
)
def test_every_sequence_is_offered_a_row_exactly_once(
    arrivals: list[tuple[float, int]], window: int, patience_s: float
) -> None:
    lengths = {handle: length for handle, (_, length) in enumerate(arrivals)}
    times = sorted(time for time, _ in arrivals)
    waiting = [waiting_sequence(handle, arrived_at=time) for handle, time in enumerate(times)]
    order = handles(LongestPrefixMatch(window, patience_s).order(waiting, matches(lengths)))
    assert sorted(order) == list(range(len(waiting)))
    if times:
        impatient = [handle for handle, time in enumerate(times) if time < times[-1] - patience_s]
        assert order[: len(impatient)] == impatient


def test_one_subject_s_flood_does_not_fill_the_window() -> None:
    """The flood came first, and its prompts are long cached; others are matched all the same."""
    flood = [waiting_sequence(handle, user="anonymous") for handle in range(300)]
    others = [waiting_sequence(300 + number, user=f"user {number}") for number in range(3)]
    lengths = {300 + number: 128 for number in range(3)}
    order = handles(LongestPrefixMatch(window=16).order([*flood, *others], matches(lengths)))
    assert order[:3] == [300, 301, 302]
    assert order[3:] == list(range(300))


def test_names_invented_in_one_tenant_do_not_fill_the_window() -> None:
    flood = [waiting_sequence(handle, user=f"invented {handle}") for handle in range(300)]
    victim = [waiting_sequence(300 + number, tenant="other") for number in range(20)]
    matched: list[int] = []

    def match(sequence: Sequence) -> int:
        matched.append(sequence.handle)
        return 0

    assert len(handles(LongestPrefixMatch(window=16).order([*flood, *victim], match))) == 320
    assert matched == [*range(8), *range(300, 308)]


def test_one_subject_alone_has_the_whole_window() -> None:
    matched: list[int] = []

    def match(sequence: Sequence) -> int:
        matched.append(sequence.handle)
        return 0

    handles(LongestPrefixMatch(window=16).order([waiting_sequence(handle) for handle in range(300)], match))
    assert matched == list(range(16))
