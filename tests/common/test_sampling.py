from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.sampling import choice_seed

SEEDS = st.integers(min_value=0, max_value=2**64 - 1)


@given(SEEDS)
def test_choice_0_keeps_the_seed_of_the_request(seed: int) -> None:
    assert choice_seed(seed, 0) == seed


@given(SEEDS, st.integers(min_value=0, max_value=1024))
def test_every_choice_seed_fits_64_bits(seed: int, index: int) -> None:
    assert 0 <= choice_seed(seed, index) < 2**64


@given(SEEDS)
def test_choices_of_one_request_have_different_seeds(seed: int) -> None:
    assert len({choice_seed(seed, index) for index in range(64)}) == 64


def test_choice_seeds_follow_splitmix64() -> None:
    # The generator's published first output for state 0.
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF
