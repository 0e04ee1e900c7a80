"""Speculative decoding never changes an answer: random lives of requests with drafts and without."""

from __future__ import annotations

import pytest

from tests.services.worker.engine.speculated_lives import Tally, compare_world

# Choices that live through the test of `make soak`.
SOAKED_LIVES = 100_000


def check(tally: Tally) -> None:
    """Assert that the lives so far had what the comparison is about."""
    assert tally.counts["accepted"] > tally.counts["tokens"] // 20
    # Wrong drafts, too.
    assert tally.counts["drafted"] > tally.counts["accepted"] * 1.1
    assert all(tally.counts[name] > tally.lives // 10 for name in ("jumped", "logprobs"))
    assert all(tally.counts[name] > tally.lives // 100 for name in ("preempted", "retracted"))


def test_drafts_change_neither_tokens_nor_log_probabilities_nor_finishes() -> None:
    tally = Tally()
    for seed in range(20):
        compare_world(seed, tally)
    assert tally.lives > 350
    check(tally)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_a_hundred_thousand_lives() -> None:
    tally, seed = Tally(), 1000
    while tally.lives < SOAKED_LIVES:
        compare_world(seed, tally)
        seed += 1
    check(tally)
