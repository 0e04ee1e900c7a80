"""Readers whose answers begin again in other portions."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.deltas import LogprobText, PromptLogprobsText, PromptUsage, TokenText
from common.types import Finish, FinishReason
from gateway.delivery.progress import Progress
from gateway.generation.journal import ChoiceUpdate

STOP = Finish(FinishReason.STOP)
LEAD = TokenText(0, 0.0, b"")
USAGE = PromptUsage(7, 4)
# The text of a token may come later than the token.
WORDS = [f" w{number}" if number % 3 else "" for number in range(12)]
TOKENS = list(range(100, 112))


def entry(number: int) -> LogprobText:
    return LogprobText(TokenText(number, -1.0, b"x"), ())


def portions(cuts: set[int], index: int = 0) -> list[ChoiceUpdate]:
    """Return the same output of a choice, cut after these numbers of tokens."""
    bounds = [0, *sorted(cuts), len(TOKENS)]
    updates = [
        ChoiceUpdate(
            index,
            "".join(WORDS[first:end]),
            TOKENS[first:end],
            [entry(token) for token in TOKENS[first:end]],
            prompt_usage=USAGE if first == 0 else None,
            prompt_ids=(1, 2) if first == 0 else (),
            forced_tokens=end - first,
        )
        for first, end in pairwise(bounds)
    ]
    return [*updates, ChoiceUpdate(index, "!", finish=STOP)]


cut_sets = st.sets(st.integers(1, len(TOKENS) - 1))


@given(cut_sets, cut_sets, st.integers(0, 13), st.integers(0, 13))
def test_what_comes_again_in_other_portions_is_returned_once(
    first: set[int], second: set[int], seen: int, seen_of_other: int
) -> None:
    progress = Progress()
    told = [*progress.news(portions(first)[:seen]), *progress.news(portions(second, 1)[:seen_of_other])]
    progress.rewind()
    for one, other in zip(portions(second), portions(second, 1), strict=True):
        told += progress.news([one, other])
    for index in (0, 1):
        own = [update for update in told if update.index == index]
        assert "".join(update.text for update in own) == "".join(WORDS) + "!"
        assert [token for update in own for token in update.token_ids] == TOKENS
        assert [logprob.token.token_id for update in own for logprob in update.logprobs] == TOKENS
        assert [update.prompt_usage for update in own if update.prompt_usage] == [USAGE]
        assert [update.prompt_ids for update in own if update.prompt_ids] == [(1, 2)]
        assert sum(update.forced_tokens for update in own) == len(TOKENS)
        assert [update.finish for update in own if update.finish] == [STOP]
        assert all(update.token_ids or update.text or update.finish for update in own)


@given(st.lists(st.integers(1, 9), max_size=3, unique=True), st.lists(st.integers(1, 9), max_size=3, unique=True))
def test_log_probabilities_of_a_prompt_come_once(first: list[int], second: list[int]) -> None:
    def parts(cuts: list[int]) -> list[ChoiceUpdate]:
        bounds = [0, *sorted(cuts), 10]
        return [
            ChoiceUpdate(
                0,
                "",
                prompt_logprobs=PromptLogprobsText(
                    start + 1,
                    [entry(number) for number in range(start, end)],
                    None if start else TokenText(0, 0.0, b""),
                ),
            )
            for start, end in pairwise(bounds)
        ]

    for seen in range(len(first) + 2):
        progress = Progress()
        told = list(progress.news(parts(first)[:seen]))
        progress.rewind()
        told += progress.news(parts(second))
        found = [update.prompt_logprobs for update in told if update.prompt_logprobs is not None]
        assert [each.token.token_id for part in found for each in part.entries] == list(range(10))
        assert [part.first for part in found] == [1 + part.entries[0].token.token_id for part in found]
        assert [part.lead is not None for part in found] == [True] + [False] * (len(found) - 1)


def test_portions_are_kept_if_the_same_updates_come_in_the_same_order() -> None:
    """The numbers of events count on it."""

    def word(index: int, number: int, count: int = 1) -> ChoiceUpdate:
        words = [f" w{each}" for each in range(number, number + count)]
        return ChoiceUpdate(index, "".join(words), tuple(range(number, number + count)))

    singles, pairs = [word(0, 0), word(1, 0), word(0, 1)], [word(0, 0, 2), word(0, 2)]
    for returned, again, keeps in (
        (singles, [*singles, word(1, 1), word(0, 2)], True),
        (singles, [word(0, 0), word(1, 0), word(1, 1), word(0, 1)], False),
        (singles, [word(0, 0, 2), word(1, 0), word(1, 1)], False),
        (singles, [word(0, 0), word(1, 0), word(0, 1, 2)], False),
        (singles, [word(0, 0, 2), word(1, 0)], False),
        (pairs, [word(0, 0), word(0, 1), word(0, 2, 2)], False),
    ):
        progress = Progress()
        progress.news(returned)
        assert progress.keeps_portions
        progress.rewind()
        for update in again:
            progress.news([update])
        assert progress.keeps_portions == keeps, again
