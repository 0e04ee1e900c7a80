"""Pure functions for sampling whose results must be equal in all services."""

from __future__ import annotations

MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def choice_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of choice `index`: the request's seed for choice 0, a hash of it for the others.

    Scheduler and gateway derive the same seed, so a choice that is resubmitted on its own continues with the same
    tokens.
    """
    if index == 0:
        return seed & MASK_64
    return _mix(seed + index * GOLDEN_GAMMA)


def _mix(value: int) -> int:
    """Finalise like splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, figure 16)."""
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)
