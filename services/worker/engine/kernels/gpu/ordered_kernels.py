"""Layer operations on a GPU with `model.deterministic`: a token's results have the same bits beside any others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.kernels.gpu import elementwise
from services.worker.engine.kernels.gpu.experts import ORDERED_PAIRS, GpuExperts
from services.worker.engine.kernels.gpu.ordered_product import OrderedMatrix
from services.worker.engine.kernels.torch.delta_net import TorchDeltaNet

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
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.matrices import Matrix


class OrderedLinear:
    """One matrix, as it is in checkpoints."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keep weight [out, in] and bias [out]."""
        self._matrix = OrderedMatrix(weight)
        self._bias = bias

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        if outputs is None:
            outputs = inputs.new_empty(inputs.shape[0], self._matrix.outputs)
        self._matrix.write(inputs, self._bias, outputs)
        return outputs

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add the product to `sums`, rounded beforehand as a product by itself is."""
        if sums.is_contiguous():
            self._matrix.write(inputs, self._bias, sums, adds=True)
        else:
            sums += self(inputs)

    def adds_within(self, tokens: int) -> bool:
        del tokens  # the program is the same for any number
        return True


class OrderedGatedLinear:
    """Gate and up projection as one product."""

    def __init__(self, both: OrderedLinear, activation: Activation) -> None:
        """Split the output of `both` into gate and up half."""
        self._both = both
        self._activation = activation

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; see `Activation`."""
        return elementwise.gate(self._both(inputs), self._activation)

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return both products; see `GatedLinear.halves`."""
        return self._both(inputs)


class OrderedWideLinear:
    """A product in float32, by matrix units that take 16 bits: the matrix is the sum of narrower ones.

    Inputs have 16 bits, and bfloat16 has as many exponents as float32, so all products are exact.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Cut weight [out, in] into matrices of bfloat16, until nothing is left; checkpoints mostly have only one."""
        rest = weight.float()
        parts: list[torch.Tensor] = []
        while not parts or (len(parts) < 3 and bool(rest.any())):
            parts.append(rest.to(torch.bfloat16).contiguous())
            rest = rest - parts[-1].float()
        self._parts = [OrderedMatrix(part) for part in parts]

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product [tokens, out] float32 of inputs [tokens, in] in bfloat16."""
        outputs = inputs.new_empty(inputs.shape[0], self._parts[0].outputs, dtype=torch.float32)
        for number, part in enumerate(self._parts):
            part.write(inputs.to(torch.bfloat16), None, outputs, adds=number > 0)
        return outputs


class OrderedKernels:
    """Layer operations whose sums have one order."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compute in `dtype` on `device`."""
        self.activation_dtype = dtype
        self._device = device

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        return self._linear(self._moved(weight), None if bias is None else self._moved(bias))

    def wide_linear(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return OrderedWideLinear(weight.to(self._device))

    def gated_linear(
        self,
        gate: Matrix,
        up: Matrix,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        activation: Activation,
    ) -> GatedLinear:
        """Lay out gate and up matrix above each other."""
        bias = torch.cat([self._moved(bias) for bias in biases]) if biases else None
        both = torch.cat([self._moved(gate), self._moved(up)])
        return OrderedGatedLinear(self._linear(both, bias), activation)

    def experts(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, *, are_all: bool = True
    ) -> Experts:
        """Stack the experts' matrices; blocks of pairs have one size."""
        return GpuExperts(
            count, matrices, activation, self.activation_dtype, self._device, are_all=are_all, tuning=ORDERED_PAIRS
        )

    def delta_net(self, constants: DeltaNetConstants) -> DeltaNet:
        return TorchDeltaNet(constants)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return elementwise.rms_norm(inputs, weight, epsilon)

    def add_rms_norm(
        self, sums: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Do so with sums, as one program."""
        if not (sums.is_contiguous() and added.is_contiguous()):
            return elementwise.rms_norm(sums.add_(added), weight, epsilon)
        return elementwise.add_rms_norm(sums, added, weight, epsilon)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> OrderedLinear:
        return OrderedLinear(weight, bias)

    def _moved(self, matrix: Matrix) -> torch.Tensor:
        if not isinstance(matrix, torch.Tensor):
            raise ConfigurationError("model.deterministic is not available with quantised matrices on GPUs")
        return matrix.to(self._device, self.activation_dtype).contiguous()
