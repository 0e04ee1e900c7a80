"""Letting a program start while the one before it still runs (programmatic dependent launch, CUDA 11.8 and later).

The rule that makes it safe: a program waits for the one before it, and only then lets the next one start. So when a
program begins, all but the one directly before it are done; ahead of its wait it may read whatever older programs
wrote, and weights, which nobody writes.
"""

from __future__ import annotations

import os

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter runs one program after another.
OVERLAPS = os.environ.get("TRITON_INTERPRET", "0") == "0"
# What every launch of a program that calls `follow` needs; others must not have it.
OPTIONS: dict[str, bool] = {"launch_pdl": True} if OVERLAPS else {}


@triton.jit
def follow():
    """Wait until what the program before wrote can be read, and let the next one start."""
    gdc_wait()
    gdc_launch_dependents()
