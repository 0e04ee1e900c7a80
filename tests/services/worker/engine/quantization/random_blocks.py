"""Blocks of GGUF files with random integers."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

# Where the scales in float16 lie in a block.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str, rows: int, blocks: int, *, seed: int = 0, deviation: float = 0.01) -> torch.Tensor:
    """Return blocks of random bytes, [rows, blocks, bytes]; only their scales are sensible, of this deviation."""
    generator = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = generator.normal(0, deviation, (rows, blocks, 1)).astype(np.float16)
        data[..., at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":  # exponents of powers of two that float16 has
        data[..., 0] = 110 + data[..., 0] % 30
    return torch.from_numpy(data)
