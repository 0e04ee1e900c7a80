"""The formats in which checkpoints store quantised matrices; `checkpoint_scheme.py` recognises them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Sides of the blocks that share a scale, and inputs that are scaled together.
FP8_BLOCK = 128
# Inputs that share a scale in MXFP4.
MXFP4_BLOCK = 32


class StoredScales(Enum):
    """The granularity of the scales of FP8 matrices in a checkpoint."""

    CHANNEL = "channel"
    """Each output: scales [out, 1]."""
    TENSOR = "tensor"
    """The matrix."""
    BLOCK = "block"
    """Blocks of 128 x 128: scales [ceil(out / 128), ceil(in / 128)]; activations have one for each 128 inputs."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """FP8 (e4m3) weights and activations."""

    scales: StoredScales
    has_input_scales: bool = False
    """Whether each matrix has one stored scale for all activations; else activations are scaled token by token."""
    scale_suffix: str = "_scale"
    """Follows the matrix's name."""


@dataclass(frozen=True, slots=True)
class Int8Format:
    """INT8 weights, one scale per output channel, and INT8 activations, one scale per token."""


class GroupedLayout(Enum):
    """Packing of integers of a few bits into words of 32."""

    AWQ = "awq"
    """`qweight` [in, out / 8], the outputs of a word interleaved; `qzeros` and `scales` by group of inputs."""
    GPTQ = "gptq"
    """`qweight` [in * bits / 32, out], `qzeros` one below the zero points, `g_idx` [in] the group of each input."""
    GPTQ_V2 = "gptq_v2"
    """The same with the zero points themselves."""
    COMPRESSED = "pack-quantized"
    """`weight_packed` [out, in * bits / 32] and `weight_scale` [out, groups] of compressed-tensors."""


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """Weights of 4 or 8 bits, one scale (and zero point) for each group of inputs of an output; wide activations."""

    layout: GroupedLayout
    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of them."""
    has_zero_points: bool
    has_group_index: bool = False
    """Whether inputs were grouped in another order than their own (act-order)."""


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Experts in MXFP4 (gpt-oss), everything else as wide as activations."""


StoredFormat = Fp8Format | Int8Format | GroupedFormat | Mxfp4Format


def column_unit(stored: StoredFormat | None) -> int:
    """Return the number of inputs that tensor-parallel ranks must keep together; 1: they may cut anywhere."""
    is_blocked = isinstance(stored, Fp8Format) and stored.scales is StoredScales.BLOCK
    return FP8_BLOCK if is_blocked else 1


def expert_column_unit(stored: StoredFormat | None) -> int:
    """Return the same for the columns of experts."""
    return MXFP4_BLOCK if isinstance(stored, Mxfp4Format) else column_unit(stored)
