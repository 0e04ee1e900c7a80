"""Layer operations in plain torch, on any device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import gelu, linear, silu

from services.worker.engine.kernels.composed import (
    ExpertLoop,
    PreparedLinear,
    WidenedLinear,
    activation_quantiser,
    round_in_groups,
)
from services.worker.engine.kernels.even import evenly
from services.worker.engine.kernels.torch.delta_net import TorchDeltaNet
from services.worker.engine.model.config import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from services.worker.engine.quantization.fp8 import Fp8BlockMatrix, Fp8Matrix
from services.worker.engine.quantization.grouped import GroupedMatrix
from services.worker.engine.quantization.int8 import Int8Matrix
from services.worker.engine.quantization.matrices import above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.worker.engine.kernels.interface import (
        DeltaNet,
        DeltaNetConstants,
        ExpertMatrices,
        Experts,
        GatedLinear,
        Linear,
    )
    from services.worker.engine.quantization.matrices import Matrix


class TorchLinear:
    """`torch.nn.functional.linear` over the matrix as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keep weight [out, in] and bias [out]."""
        self._weight = weight
        self._bias = bias

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        product = linear(inputs, self._weight, self._bias)
        return product if outputs is None else outputs.copy_(product)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        sums += self(inputs)

    def adds_within(self, tokens: int) -> bool:
        del tokens
        return False


class PrepackedLinear:
    """oneDNN's product over weights in its own blocked layout.

    `linear` lays the weights out again at every call. On an EPYC 9004 (2 cores, fp32, 3,072 x 576; GFLOP/s at 1 / 8 /
    32 / 256 tokens) `linear` reaches 6 / 43 / 105 / 179, packed by MKL 12 / 33 / 89 / 175, packed by oneDNN 16 / 121 /
    189 / 220.
    """

    # The layout is chosen for this many tokens; other counts are right and nearly as fast.
    _TYPICAL_TOKENS = 32

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Lay out weight [out, in]; keep bias [out]."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._TYPICAL_TOKENS)
        self._bias = bias

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return product if outputs is None else outputs.copy_(product)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        sums += self(inputs)

    def adds_within(self, tokens: int) -> bool:
        del tokens
        return False


class TorchGatedLinear:
    """Gate and up projection as one product."""

    def __init__(self, both: Linear, activation: Activation) -> None:
        """Split the output of `both` into gate and up half."""
        self._both = both
        self._activation = activation

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; see `Activation`."""
        gate, up = self.halves(inputs).chunk(2, dim=-1)
        return gated(gate, up, self._activation)

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return both products; see `GatedLinear.halves`."""
        return self._both(inputs)


class TorchKernels:
    """Layer operations by torch; on CPUs with weights packed by oneDNN where it is built in."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compute in `dtype` on `device`."""
        self.activation_dtype = dtype
        self._device = device
        packs = device.type == "cpu" and can_prepack(dtype)
        self._linear_type: type[PrepackedLinear | TorchLinear] = PrepackedLinear if packs else TorchLinear

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        """Lay out a matrix; a quantised one is widened."""
        match weight:
            case Fp8Matrix() | Int8Matrix():
                # Sums of products that are still to be scaled leave float16's range.
                wide = torch.float32 if self.activation_dtype == torch.float16 else self.activation_dtype
                matrix = weight.to(self._device)
                values = self._linear_type(matrix.values.to(wide), None)
                return WidenedLinear(values, wide, activation_quantiser(matrix), matrix.scales, bias)
            case Fp8BlockMatrix():
                return PreparedLinear(
                    self._plain(weight.to(self._device).widened(torch.float32), bias), round_in_groups
                )
            case GroupedMatrix():
                moved = weight.to(self._device)
                product = self._plain(moved.widened(torch.float32), bias)
                return PreparedLinear(product, moved.ordered_inputs) if moved.order is not None else product
            case _:
                return self._plain(weight, bias)

    def wide_linear(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Lay out a matrix in float32."""
        return wide_product(weight.to(self._device))

    def _plain(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._linear_type(self._converted(weight), None if bias is None else self._converted(bias))

    def gated_linear(
        self,
        gate: Matrix,
        up: Matrix,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        activation: Activation,
    ) -> GatedLinear:
        """Lay out gate and up matrix above each other."""
        return TorchGatedLinear(self.linear(above(gate, up), torch.cat(biases) if biases else None), activation)

    def experts(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, *, are_all: bool = True
    ) -> Experts:
        """Lay out each expert by itself."""
        del are_all  # the loop passes by experts elsewhere in any case
        return ExpertLoop(self, count, matrices, activation)

    def delta_net(self, constants: DeltaNetConstants) -> DeltaNet:
        return TorchDeltaNet(constants)

    def _converted(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self._device, self.activation_dtype)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return rms_norm(inputs, weight, epsilon)

    def add_rms_norm(
        self, sums: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add, then normalise."""
        return rms_norm(sums.add_(added), weight, epsilon)


def wide_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product in float32 with `weight` [out, in]."""
    wide = weight.float()
    return lambda inputs: linear(inputs.float(), wide)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Multiply the activated gate of a feed-forward layer with its other half."""
    match activation:
        case Activation.SILU:
            return evenly(silu, gate) * up
        case Activation.GELU_TANH:
            return evenly(partial(gelu, approximate="tanh"), gate) * up
        case Activation.CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return (up + 1) * (gate * evenly(torch.sigmoid, gate * SWIGLU_ALPHA))


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise over the last dimension, in float32 for all types (Zhang and Sennrich 2019).

    What is multiplied with the weights has their type: Llama's are as narrow as the inputs, Gemma's are wide.
    """
    wide = inputs.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (weight * (wide * scale).to(weight.dtype)).to(inputs.dtype)


def can_prepack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return False
    # bfloat16 needs AVX-512 or AVX-NE-CONVERT.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
