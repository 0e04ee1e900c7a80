"""Uniform numbers as a pure function of (seed, position), with the counter-based generator Philox4x32-10.

Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

ROUNDS = 10
_MASK = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
# Multipliers of the two halves of the counter, and what is added to the two halves of the key in each round.
_MULTIPLIERS = np.array([[0xD251_1F53], [0xCD9E_8D57]], np.uint64)
_WEYL = np.array([0x9E37_79B9, 0xBB67_AE85], np.uint64)


def philox4x32(key: Words, counter: Words) -> Words:
    """Return four 32-bit words per counter.

    Args:
        key: [2, n] values below 2^32, in uint64 so that products of two of them fit.
        counter: [4, n] likewise.

    Returns:
        [4, n] likewise.
    """
    keys = (key[None] + np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL[:, None]) & _MASK
    multiplied, mixed = counter[0::2], counter[1::2]
    for round_key in keys:
        product = multiplied * _MULTIPLIERS
        multiplied, mixed = (product >> _HALF)[::-1] ^ mixed ^ round_key, (product & _MASK)[::-1]
    words = np.empty_like(counter)
    words[0::2], words[1::2] = multiplied, mixed
    return words


def uniforms(seeds: Words, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return one number in [0, 1) for each pair of seed and token position, [n] float32 with 24 random bits."""
    key = np.stack([seeds & _MASK, seeds >> _HALF])
    counter = np.zeros((4, seeds.size), np.uint64)
    counter[0] = positions
    words = philox4x32(key, counter)
    # 24 bits fill a float32 exactly, so that rounding never reaches 1.
    shares: NDArray[np.float32] = (words[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return shares
