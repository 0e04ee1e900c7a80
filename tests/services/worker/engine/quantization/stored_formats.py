"""Checkpoints quantised by rounding to nearest, in the formats of the usual tools, and what they stand for in float64.

Words are packed here as the tools' own descriptions say, place by place, not as the engine unpacks them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.services.worker.engine.quantization.fp8_checkpoints import change_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Tensors = dict[str, torch.Tensor]

FP8 = torch.float8_e4m3fn
# The names of matrices that tools quantise; experts that share a tensor are not among them.
PROJECTIONS = re.compile(r"(_proj|_proj_with_mqa|_linear|experts\.\d+\.w[123])\.weight$")
# The outputs of a word of AWQ's, from its lowest bits on.
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
_INT8_TOKENS = {**_INT8, "dynamic": True, "strategy": "token"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}


@dataclass(frozen=True)
class Stored:
    """One matrix: its tensors, named after its stem, and its weights in float64 [out, in]."""

    tensors: Tensors
    weight: torch.Tensor


@dataclass(frozen=True)
class Scheme:
    """A format: its `quantization_config`, how a matrix is stored, and what its activations are rounded to."""

    config: Mapping[str, Any]
    store: Callable[[torch.Tensor], Stored]
    round_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    layout: IntegerLayout | None = None
    """Of integers, which a method may choose instead of rounding to nearest."""


def rounded_to_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return values / scales in FP8."""
    return (values.float() / scales.float()).clamp(-448, 448).to(FP8)


def fp8_blocks(weight: torch.Tensor) -> Stored:
    """Store one scale for each block of 128 x 128, which is multiplied with it."""
    height, width = weight.shape
    scales = torch.zeros(-(-height // 128), -(-width // 128))
    values, wide = torch.zeros_like(weight).to(FP8), torch.zeros(height, width, dtype=torch.float64)
    for i, j in torch.cartesian_prod(torch.arange(scales.shape[0]), torch.arange(scales.shape[1])).tolist():
        part = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
        scales[i, j] = weight[part].abs().max() / 448
        values[part] = rounded_to_fp8(weight[part], scales[i, j])
        wide[part] = values[part].double() * scales[i, j].double()
    return Stored({"weight": values, "weight_scale_inv": scales}, wide)


def compressed_fp8_blocks(weight: torch.Tensor) -> Stored:
    """Store the same under the names of compressed-tensors."""
    stored = fp8_blocks(weight)
    return Stored(
        {"weight": stored.tensors["weight"], "weight_scale": stored.tensors["weight_scale_inv"]}, stored.weight
    )


def static_fp8(weight: torch.Tensor) -> Stored:
    """Store one scale for the matrix and one for its activations."""
    scale = weight.abs().max() / 448
    values = rounded_to_fp8(weight, scale)
    tensors = {"weight": values, "weight_scale": scale.view(1), "input_scale": torch.tensor(STATIC_SCALE)}
    return Stored(tensors, values.double() * scale.double())


def fp8_tensor(weight: torch.Tensor) -> Stored:
    """Store one scale for the matrix."""
    scale = weight.abs().max() / 448
    values = rounded_to_fp8(weight, scale)
    return Stored({"weight": values, "weight_scale": scale}, values.double() * scale.double())


def fp8_channels(weight: torch.Tensor) -> Stored:
    """Store one scale for each output."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    values = rounded_to_fp8(weight, scales)
    return Stored({"weight": values, "weight_scale": scales}, values.double() * scales.double())


def int8_channels(weight: torch.Tensor) -> Stored:
    """Store one scale for each output."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127.5
    values = (weight / scales).round().clamp(-128, 127).to(torch.int8)
    return Stored({"weight": values, "weight_scale": scales}, values.double() * scales.double())


STATIC_SCALE = 0.02


def round_to_static_fp8(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs as one scale for all leaves them."""
    return rounded_to_fp8(inputs, torch.tensor(STATIC_SCALE)).double() * torch.tensor(STATIC_SCALE).double()


def round_to_fp8_groups(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs [..., in] as one scale for each 128 of them leaves them."""
    parts = []
    for part in torch.split(inputs.float(), 128, dim=-1):
        scales = part.abs().amax(dim=-1, keepdim=True) / 448
        parts.append(rounded_to_fp8(part, scales).double() * scales.double())
    return torch.cat(parts, dim=-1)


def round_to_int8(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs [..., in] as one scale for each token leaves them."""
    scales = inputs.float().abs().amax(dim=-1, keepdim=True) / 127.5
    return (inputs.float() / scales).round().clamp(-128, 127).double() * scales.double()


@dataclass(frozen=True)
class Integers:
    """A matrix rounded to integers: values [out, in], scales and zero points [out, groups], group of each input."""

    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor
    groups: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        scales, zero_points = self.scales.double()[:, self.groups], self.zero_points.double()[:, self.groups]
        return (self.values.double() - zero_points) * scales


@dataclass(frozen=True)
class IntegerLayout:
    """How integers are grouped, and packed."""

    bits: int
    size: int
    """Inputs that share a scale; -1: all."""
    symmetric: bool
    act_order: bool
    pack: Callable[[Integers], Stored]

    def store(self, weight: torch.Tensor) -> Stored:
        """Store a matrix, rounded to nearest."""
        return self.pack(rounded(weight, self.bits, self.size, symmetric=self.symmetric, shuffled=self.act_order))


def grid(part: torch.Tensor, bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point [out, 1] of one group's weights [out, inputs]."""
    largest = 2**bits - 1
    low, high = part.amin(dim=1, keepdim=True).clamp_max(0), part.amax(dim=1, keepdim=True).clamp_min(0)
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scale = ((high - low) / largest).clamp_min(1e-6).half().float()
    if symmetric:
        return scale, torch.full_like(scale, 2 ** (bits - 1))
    return scale, (-low / scale).round().clamp(1, largest)  # GPTQ stores one less


def rounded(weight: torch.Tensor, bits: int, size: int, *, symmetric: bool, shuffled: bool = False) -> Integers:
    """Round to nearest, in groups of `size` inputs (-1: all), which are neighbours or, as by act-order, any."""
    width = weight.shape[1]
    groups = torch.arange(width) // (width if size == -1 else size)
    if shuffled:
        groups = groups[torch.randperm(width, generator=torch.Generator().manual_seed(1))]
    largest = 2**bits - 1
    scales, zero_points, values = [], [], torch.zeros(weight.shape, dtype=torch.int32)
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        scale, zero = grid(part, bits, symmetric=symmetric)
        values[:, groups == group] = (part / scale + zero).round().clamp(0, largest).int()
        scales.append(scale)
        zero_points.append(zero.int())
    return Integers(values, torch.cat(scales, dim=1).half(), torch.cat(zero_points, dim=1), groups)


def words(values: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return int32 words of the integers [rows, columns], packed along columns: the lowest bits hold `places[0]`."""
    count = 32 // bits
    result = torch.zeros(values.shape[0], values.shape[1] // count, dtype=torch.int64)
    for i, place in enumerate(places or range(count)):
        result |= values[:, place::count].long() << (bits * i)
    return torch.where(result >= 2**31, result - 2**32, result).int()


def packed_scheme(config: Mapping[str, Any], layout: IntegerLayout) -> Scheme:
    """Return a format of integers that are rounded to nearest."""
    return Scheme(config, layout.store, layout=layout)


def awq(size: int) -> Scheme:
    """AWQ as AutoAWQ writes it, version GEMM."""

    def pack(integers: Integers) -> Stored:
        tensors = {
            "qweight": words(integers.values.t(), 4, AWQ_OUTPUTS),
            "qzeros": words(integers.zero_points.t(), 4, AWQ_OUTPUTS),
            "scales": integers.scales.t().contiguous(),
        }
        return Stored(tensors, integers.weight)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return packed_scheme(config, IntegerLayout(4, size, symmetric=False, act_order=False, pack=pack))


def gptq(bits: int, size: int, *, symmetric: bool = True, act_order: bool = False, version: int = 1) -> Scheme:
    """GPTQ as AutoGPTQ (version 1) and GPTQModel (version 2) write it."""

    def pack(integers: Integers) -> Stored:
        tensors = {
            "qweight": words(integers.values, bits).t().contiguous(),
            "qzeros": words((integers.zero_points - int(version == 1)).t(), bits),
            "scales": integers.scales.t().contiguous(),
            "g_idx": integers.groups.int(),
        }
        return Stored(tensors, integers.weight)

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": symmetric}
    layout = IntegerLayout(bits, size, symmetric=symmetric, act_order=act_order, pack=pack)
    return packed_scheme(config if version == 1 else {**config, "checkpoint_format": "gptq_v2"}, layout)


def compressed(bits: int, size: int, *, symmetric: bool = True, act_order: bool = False) -> Scheme:
    """Packed weights of compressed-tensors."""

    def pack(integers: Integers) -> Stored:
        tensors = {
            "weight_packed": words(integers.values, bits),
            "weight_scale": integers.scales.to(torch.bfloat16),
            "weight_shape": torch.tensor(integers.values.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(integers.zero_points.t().contiguous(), bits).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = integers.groups.int()
        scales = tensors["weight_scale"].double()[:, integers.groups]
        wide = (integers.values.double() - integers.zero_points.double()[:, integers.groups]) * scales
        return Stored(tensors, wide)

    numbers = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "channel" if size == -1 else "group", "group_size": None if size == -1 else size,
        "actorder": "group" if act_order else None,
    }  # fmt: skip
    layout = IntegerLayout(bits, size, symmetric=symmetric, act_order=act_order, pack=pack)
    return packed_scheme(compressed_config("pack-quantized", numbers, None), layout)


def compressed_config(layout: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }  # fmt: skip


_BLOCKS = {**_FP8, "strategy": "block", "block_structure": [128, 128], "dynamic": False}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
INT8 = compressed_config("int-quantized", {**_INT8, "strategy": "channel", "dynamic": False}, _INT8_TOKENS)
SCHEMES: dict[str, Scheme] = {
    "fp8 blocks": Scheme(FP8_BLOCKS, fp8_blocks, round_to_fp8_groups),
    "compressed fp8 blocks": Scheme(
        compressed_config(
            "float-quantized", _BLOCKS, {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True}
        ),
        compressed_fp8_blocks,
        round_to_fp8_groups,
    ),
    "fp8 static": Scheme(FP8_STATIC, static_fp8, round_to_static_fp8),
    "compressed fp8 static": Scheme(
        compressed_config(
            "float-quantized", {**_FP8, "strategy": "tensor"}, {**_FP8, "strategy": "tensor", "dynamic": False}
        ),
        static_fp8,
        round_to_static_fp8,
    ),
    "int8": Scheme(INT8, int8_channels, round_to_int8),
    "awq 128": awq(128),
    "awq 32": awq(32),
    "gptq": gptq(4, 128),
    "gptq whole rows": gptq(4, -1),
    "gptq zero points": gptq(4, 64, symmetric=False),
    "gptq v2": gptq(4, 32, symmetric=False, version=2),
    "gptq act-order": gptq(4, 64, act_order=True),
    "gptq act-order zero points": gptq(4, 32, symmetric=False, act_order=True),
    "gptq 8 bits": gptq(8, 128, symmetric=False),
    "compressed 4 bits": compressed(4, 128),
    "compressed whole rows": compressed(4, -1),
    "compressed zero points": compressed(4, 32, symmetric=False),
    "compressed act-order": compressed(4, 64, act_order=True),
    "compressed 8 bits": compressed(8, 64),
}


def store_quantised(
    directory: Path, scheme: Scheme, *, but: tuple[str, ...] = (), chosen: Mapping[str, Stored] | None = None
) -> dict[str, torch.Tensor]:
    """Rewrite the checkpoint in `directory`: projections are quantised, but for names that contain one of `but`.

    Args:
        directory: with `model.safetensors`.
        scheme: the format.
        but: parts of names that stay as they are.
        chosen: matrices that are stored already, by the names of their weights; others are rounded to nearest.

    Returns:
        The weights in float64 of the matrices that are, by name.
    """
    tensors: Tensors = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 2 or not PROJECTIONS.search(name) or any(part in name for part in but):
            tensors[name] = tensor
            continue
        stored = (chosen or {}).get(name) or scheme.store(tensor.float())
        weights[name] = stored.weight
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{part}": each.contiguous() for part, each in stored.tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    change_config(directory, quantization_config=dict(scheme.config))
    return weights


def config_of(directory: Path) -> dict[str, Any]:
    """Return config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config
