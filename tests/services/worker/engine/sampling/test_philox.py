from __future__ import annotations

import numpy as np
import pytest

from services.worker.engine.sampling.sampler import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # The generator's published known answers (kat_vectors of Random123).
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    # Several at once must not influence each other.
    counters = np.array([counter, [1, 2, 3, 4]], np.uint64).T.copy()
    keys = np.array([key, [5, 6]], np.uint64).T.copy()
    assert philox4x32(keys, counters)[:, 0].tolist() == words


def test_uniforms_depend_on_seed_and_position_only() -> None:
    seeds = np.array([7, 2**64 - 1, 7], np.uint64)
    positions = np.array([10, 11, 12], np.int64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in (2, 0, 1)]
    assert together[[2, 0, 1]].tolist() == alone


def test_both_halves_of_a_seed_matter() -> None:
    seeds = np.array([1, 1 + 2**32, 2], np.uint64)
    assert len(set(uniforms(seeds, np.zeros(3, np.int64)).tolist())) == 3


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    count = 100_000
    numbers = uniforms(np.full(count, 42, np.uint64), np.arange(count))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, bins=100, range=(0, 1))[0] / count
    assert np.abs(shares - 0.01).max() < 0.002
    # Neighbouring positions are not correlated.
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
