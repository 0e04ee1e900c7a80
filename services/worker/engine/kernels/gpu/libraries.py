"""Which of the libraries of GPU kernels are installed, asked without importing them, as that takes seconds."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which most modules of this folder import."""
    return importlib.util.find_spec("triton") is not None


@cache
def has_flashinfer() -> bool:
    """Whether FlashInfer is installed. Its kernels may be missing nonetheless: see `prebuild.py`."""
    return importlib.util.find_spec("flashinfer") is not None
