"""Letting a program start while the one before it still runs (programmatic dependent launch, Hopper and later).

The rule that makes it safe: a program waits for the one before it, and only then lets the next one start. So when a
program begins, all but the one directly before it are done; ahead of its wait it may read whatever older programs
wrote, and weights, which are constant.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter runs one program after another.
_IS_COMPILED = os.environ.get("TRITON_INTERPRET", "0") == "0"
_HOPPER = (9, 0)
# With more tokens programs last much longer than a launch, and waiting programs take resources from running ones.
MOST_TOKENS = 64


def launch_options(tokens: int, most_tokens: int = MOST_TOKENS) -> dict[str, bool]:
    """Return the arguments of a launch for `tokens` tokens that say whether it overlaps with the one before.

    It does with up to `most_tokens`.
    """
    return {"OVERLAPS": True, "launch_pdl": True} if tokens <= most_tokens and _can_overlap() else {"OVERLAPS": False}


@functools.cache
def _can_overlap() -> bool:
    """Return whether this process's GPU can do it."""
    return _IS_COMPILED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= _HOPPER


@triton.jit
def follow():
    """Wait until the writes of the program before are visible, then let the next one start."""
    gdc_wait()
    gdc_launch_dependents()
