"""Layer operations by the compiled operators: CPUs only, activations in float32 for all types of weights.

Products with bfloat16 weights round their inputs to bfloat16 where the processor has an instruction for such pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.worker.engine.host_memory import HostArena
from services.worker.engine.kernels.composed import (
    ExpertLoop,
    PreparedLinear,
    WidenedLinear,
    activation_quantiser,
    round_in_groups,
)
from services.worker.engine.kernels.cpu.library import ACTIVATIONS, ELEMENT_TYPES, CpuLibrary
from services.worker.engine.kernels.torch.kernels import TorchGatedLinear
from services.worker.engine.quantization.fp8 import Fp8BlockMatrix, Fp8Matrix
from services.worker.engine.quantization.grouped import GroupedMatrix
from services.worker.engine.quantization.int8 import Int8Matrix
from services.worker.engine.quantization.matrices import above

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.kernels.interface import ExpertMatrices, Experts, GatedLinear, Linear
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.matrices import Matrix


_INPUTS_PER_STEP = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [outputs, inputs] as operators/matrix.hpp wants it.

    `panels` is [panels, inputs / pair, panel, pair], the last panel filled up with zeros; pair is 2 for bfloat16, else
    1.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None  # [outputs] float32
    inputs: int
    outputs: int

    @property
    def address(self) -> int:
        return self.panels.data_ptr()

    @property
    def bias_address(self) -> int | None:
        """Where the biases begin, or None for a null pointer."""
        return None if self.bias is None else self.bias.data_ptr()

    @property
    def element_type(self) -> int:
        """The library's number of the weights' type."""
        return ELEMENT_TYPES[self.panels.dtype]


class CpuLinear:
    """A product in tiles that stay in registers.

    Floating-point operations per second reach 95 % of what the cores can do from 32 tokens on, and a single token is
    bound by memory. GFLOP/s on two cores of an EPYC 9004 (peak 236), fp32, 3,072 x 576, at 1 / 8 / 32 / 256 tokens:
    20 / 200 / 222 / 226; compare `PrepackedLinear`.
    """

    def __init__(self, library: CpuLibrary, matrix: PackedMatrix, threads: int) -> None:
        """Multiply with `matrix` on `threads` threads."""
        self.library = library
        self.matrix = matrix
        self.threads = threads
        self._constants = (matrix.address, matrix.element_type, matrix.bias_address)

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        if outputs is None:
            outputs = inputs.new_empty(inputs.shape[0], self.matrix.outputs)
        self._run(inputs, outputs, accumulate=0)
        return outputs

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        self._run(inputs, sums, accumulate=1)

    def _run(self, inputs: torch.Tensor, outputs: torch.Tensor, accumulate: int) -> None:
        assert inputs.is_contiguous(), "operators take contiguous activations"
        assert outputs.is_contiguous(), "operators write contiguous activations"
        weights, element_type, bias = self._constants
        self.library.linear(
            inputs.data_ptr(), weights, element_type, bias, inputs.shape[0], self.matrix.inputs, self.matrix.outputs,
            outputs.data_ptr(), accumulate, self.threads,
        )  # fmt: skip


class CpuGatedLinear:
    """Gate and up product of a tile of tokens, joined before they leave the cache."""

    def __init__(
        self, library: CpuLibrary, gate: PackedMatrix, up: PackedMatrix, activation: Activation, threads: int
    ) -> None:
        """Multiply with `gate` and `up` on `threads` threads."""
        assert gate.panels.dtype == up.panels.dtype, "gate and up are of one type"
        self._library = library
        self.gate = gate
        self.up = up
        self.activation = ACTIVATIONS[activation]
        self._threads = threads

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up."""
        assert inputs.is_contiguous(), "operators take contiguous activations"
        gate, up = self.gate, self.up
        outputs = inputs.new_empty(inputs.shape[0], gate.outputs)
        self._library.gated_linear(
            inputs.data_ptr(), gate.address, up.address, gate.element_type, gate.bias_address, up.bias_address,
            inputs.shape[0], gate.inputs, gate.outputs, outputs.data_ptr(), self.activation, self._threads,
        )  # fmt: skip
        return outputs


class CpuKernels:
    """Layer operations on CPUs."""

    activation_dtype = torch.float32

    def __init__(self, library: CpuLibrary, dtype: torch.dtype, threads: int) -> None:
        """Hold weights as `dtype` and compute on `threads` threads."""
        self._library = library
        self._dtype = dtype
        self._threads = threads
        self._arena = HostArena()

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        """Lay out a matrix; a quantised one is widened."""
        match weight:
            case Fp8Matrix() | Int8Matrix():
                # The narrowest type that holds FP8 and INT8 values exactly; so do inputs that are rounded to it.
                packed = self._pack(weight.values, None, torch.bfloat16)
                product = CpuLinear(self._library, packed, self._threads)
                return WidenedLinear(product, torch.float32, activation_quantiser(weight), weight.scales, bias)
            case Fp8BlockMatrix():
                return PreparedLinear(self._plain(weight.widened(torch.float32), bias), round_in_groups)
            case GroupedMatrix():
                product = self._plain(weight.widened(torch.float32), bias)
                return PreparedLinear(product, weight.ordered_inputs) if weight.order is not None else product
            case _:
                return self._plain(weight, bias)

    def gated_linear(
        self, gate: Matrix, up: Matrix, biases: tuple[torch.Tensor, torch.Tensor] | None, activation: Activation
    ) -> GatedLinear:
        """Lay out gate and up matrix."""
        if not isinstance(gate, torch.Tensor) or not isinstance(up, torch.Tensor):
            # Inputs are quantised or put in order once, and scales come before the activation.
            return TorchGatedLinear(self.linear(above(gate, up), torch.cat(biases) if biases else None), activation)
        gate_bias, up_bias = biases or (None, None)
        packed = self._pack(gate, gate_bias, self._dtype), self._pack(up, up_bias, self._dtype)
        return CpuGatedLinear(self._library, *packed, activation, self._threads)

    def experts(self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation) -> Experts:
        """Lay out each expert by itself."""
        return ExpertLoop(self, count, matrices, activation)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        assert inputs.is_contiguous(), "operators take contiguous activations"
        outputs = torch.empty_like(inputs)
        tokens, width = inputs.shape
        self._library.rms_norm(
            inputs.data_ptr(), weight.data_ptr(), epsilon, tokens, width, outputs.data_ptr(), self._threads
        )
        return outputs

    def add_rms_norm(
        self, sums: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add, then normalise."""
        return self.rms_norm(sums.add_(added), weight, epsilon)

    def _plain(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return CpuLinear(self._library, self._pack(weight, bias, self._dtype), self._threads)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedMatrix:
        outputs, inputs = weight.shape
        panel, pair = self._library.panel, _INPUTS_PER_STEP[dtype]
        assert inputs % pair == 0, "no model has layers of odd width"
        panels, whole = -(-outputs // panel), outputs // panel
        packed = self._arena.zeros((panels, inputs // pair, panel, pair), dtype)
        rows = weight.reshape(outputs, inputs // pair, pair)
        packed[:whole] = rows[: whole * panel].view(whole, panel, inputs // pair, pair).transpose(1, 2)
        if whole < panels:
            packed[whole, :, : outputs - whole * panel] = rows[whole * panel :].transpose(0, 1)
        return PackedMatrix(packed, None if bias is None else bias.float().contiguous(), inputs, outputs)
