"""Layer operations on a GPU: matrix products by torch, all else and the smallest products by Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from services.worker.engine.kernels.gpu import elementwise, small_linear
from services.worker.engine.kernels.gpu.delta_net import ChunkTables, GpuDeltaNet
from services.worker.engine.kernels.gpu.experts import GpuExperts
from services.worker.engine.kernels.gpu.fp8_linear import GpuFp8GatedLinear, GpuFp8Linear
from services.worker.engine.kernels.gpu.grouped_product import can_pack
from services.worker.engine.kernels.gpu.quantised_linear import GpuQuantisedGatedLinear, GpuQuantisedLinear, product_of
from services.worker.engine.kernels.torch.delta_net import TorchDeltaNet
from services.worker.engine.kernels.torch.kernels import wide_product
from services.worker.engine.quantization.fp8 import Fp8Matrix
from services.worker.engine.quantization.grouped import GroupedMatrix
from services.worker.engine.quantization.matrices import above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.worker.engine.kernels.gpu.flashinfer_products import FlashInferProducts
    from services.worker.engine.kernels.gpu.quantised_linear import Product
    from services.worker.engine.kernels.interface import (
        DeltaNet,
        DeltaNetConstants,
        ExpertMatrices,
        Experts,
        GatedLinear,
        Linear,
    )
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.fp8 import Fp8BlockMatrix
    from services.worker.engine.quantization.int8 import Int8Matrix
    from services.worker.engine.quantization.matrices import Matrix


class GpuLinear:
    """One matrix, as it is in checkpoints."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keep weight [out, in] and bias [out]."""
        self._weight = weight
        self._bias = bias

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        if inputs.shape[0] <= small_linear.MOST_TOKENS:
            return small_linear.product(inputs, self._weight, self._bias, outputs)
        if outputs is None:
            return linear(inputs, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(inputs, self._weight.t(), out=outputs)
        return torch.addmm(self._bias, inputs, self._weight.t(), out=outputs)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add the product to `sums`, within the matrix product where there is no bias."""
        if inputs.shape[0] <= small_linear.MOST_TOKENS and sums.is_contiguous():
            small_linear.add_product(inputs, self._weight, self._bias, sums)
        elif self._bias is None:
            sums.addmm_(inputs, self._weight.t())
        else:
            sums += linear(inputs, self._weight, self._bias)

    def adds_within(self, tokens: int) -> bool:
        return self._bias is None or tokens <= small_linear.MOST_TOKENS


class GpuGatedLinear:
    """Gate and up projection as one product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> None:
        """Keep weight [2 intermediate, in], gate above up, and bias [2 intermediate]."""
        self._weight = weight
        self._bias = bias
        self._activation = activation

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; see `Activation`."""
        if inputs.shape[0] <= small_linear.MOST_TOKENS:
            return small_linear.gated_product(inputs, self._weight, self._bias, self._activation)
        return elementwise.gate(linear(inputs, self._weight, self._bias), self._activation)

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return both products; see `GatedLinear.halves`."""
        return linear(inputs, self._weight, self._bias)


class GpuKernels:
    """Layer operations on one GPU."""

    def __init__(self, dtype: torch.dtype, device: torch.device, flashinfer: FlashInferProducts | None = None) -> None:
        """Compute in `dtype` (bfloat16 or float16) on `device`, with FlashInfer's products where they serve."""
        self.activation_dtype = dtype
        self._device = device
        self._flashinfer = flashinfer
        self._chunk_tables = ChunkTables()

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        converted_bias = None if bias is None else self._converted(bias)
        match self._moved(weight):
            case Fp8Matrix() as matrix:
                return GpuFp8Linear(matrix, converted_bias)
            case torch.Tensor() as matrix:
                return GpuLinear(matrix, converted_bias)
            case matrix:
                return GpuQuantisedLinear(self._product_of(matrix), converted_bias)

    def wide_linear(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return wide_product(weight.to(self._device))

    def gated_linear(
        self,
        gate: Matrix,
        up: Matrix,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        activation: Activation,
    ) -> GatedLinear:
        """Lay out gate and up matrix above each other."""
        bias = torch.cat([self._converted(bias) for bias in biases]) if biases else None
        match above(self._moved(gate), self._moved(up)):
            case Fp8Matrix() as both:
                return GpuFp8GatedLinear(both, bias, activation)
            case torch.Tensor() as both:
                return GpuGatedLinear(both, bias, activation)
            case both:
                return GpuQuantisedGatedLinear(GpuQuantisedLinear(self._product_of(both), bias), activation)

    def experts(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, *, are_all: bool = True
    ) -> Experts:
        """Stack the experts' matrices."""
        return GpuExperts(count, matrices, activation, self.activation_dtype, self._device, are_all=are_all)

    def delta_net(self, constants: DeltaNetConstants) -> DeltaNet:
        """Return the recurrence of a gated delta net, as programs where it looks back by at least a token."""
        if constants.filters.shape[0] < 2:
            return TorchDeltaNet(constants)
        return GpuDeltaNet(constants, self._chunk_tables)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return elementwise.rms_norm(inputs, weight, epsilon)

    def add_rms_norm(
        self, sums: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Do so with sums, as one program: after each half of a layer that ranks share."""
        if not (sums.is_contiguous() and added.is_contiguous()):
            return elementwise.rms_norm(sums.add_(added), weight, epsilon)
        return elementwise.add_rms_norm(sums, added, weight, epsilon)

    def _product_of(self, matrix: Fp8BlockMatrix | Int8Matrix | GroupedMatrix) -> Product:
        return product_of(matrix, self.activation_dtype, self._flashinfer)

    def _moved(self, matrix: Matrix) -> Matrix:
        if isinstance(matrix, torch.Tensor):
            return self._converted(matrix)
        moved = matrix.to(self._device)
        if isinstance(moved, GroupedMatrix) and not can_pack(moved):
            return moved.plain(self.activation_dtype)
        return moved

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, self.activation_dtype).contiguous()
