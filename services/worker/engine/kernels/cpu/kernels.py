"""Layer operations by the compiled operators: CPUs only, activations in float32 for all types of weights.

Products with bfloat16 weights round their inputs to bfloat16 where the processor has an instruction for such pairs.
Packed weights meet these inputs as integers, without being rounded, or rounded where AMX or oneDNN multiplies them.
Elsewhere weights of 16 bits are widened while they are multiplied, and results have the bits of float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from services.worker.engine.host_memory import HostArena
from services.worker.engine.kernels.composed import (
    ExpertLoop,
    PreparedLinear,
    WidenedLinear,
    activation_quantiser,
    round_in_groups,
)
from services.worker.engine.kernels.cpu.library import ACTIVATIONS, ELEMENT_TYPES, CpuLibrary, MatrixArguments
from services.worker.engine.kernels.torch.delta_net import TorchDeltaNet
from services.worker.engine.kernels.torch.kernels import TorchGatedLinear
from services.worker.engine.quantization.fp8 import Fp8BlockMatrix, Fp8Matrix
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers
from services.worker.engine.quantization.int8 import Int8Matrix
from services.worker.engine.quantization.matrices import above

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.kernels.cpu.onednn import BlockFunctions
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


# Inputs of packed integers that lie together.
_INTEGERS_PER_STEP = 16
_INPUTS_PER_STEP = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class LaidOutMatrix:
    """A matrix [outputs, inputs] as the operators want it, by addresses in the tensors that it keeps.

    `panels` is [panels, inputs / pair, panel, pair], the last panel filled up with zeros; pair is 2 for bfloat16, else
    1. Packed integers are [panels, inputs / 16, 2 * bits * panel] bytes, scales [panels, groups, 1 or 2, panel].
    """

    panels: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None  # [outputs] float32
    arguments: MatrixArguments


class CpuLinear:
    """A product in tiles that stay in registers.

    Floating-point operations per second reach 95 % of what the cores can do from 32 tokens on, and a single token is
    bound by memory. GFLOP/s on two cores of an EPYC 9004 (peak 236), fp32, 3,072 x 576, at 1 / 8 / 32 / 256 tokens:
    20 / 200 / 222 / 226; compare `PrepackedLinear`.
    """

    def __init__(self, library: CpuLibrary, matrix: LaidOutMatrix, dtype: torch.dtype, threads: int) -> None:
        """Multiply with `matrix`, whose weights are `dtype` or unpacked to it, on `threads` threads."""
        self.library = library
        self.matrix = matrix
        self.element_type = ELEMENT_TYPES[dtype]
        self.threads = threads
        self._arguments = ctypes.pointer(matrix.arguments)

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        if outputs is None:
            outputs = inputs.new_empty(inputs.shape[0], self.matrix.arguments.outputs)
        self._run(inputs, outputs, accumulate=0)
        return outputs

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        self._run(inputs, sums, accumulate=1)

    def adds_within(self, tokens: int) -> bool:
        del tokens
        return True

    def _run(self, inputs: torch.Tensor, outputs: torch.Tensor, accumulate: int) -> None:
        assert inputs.is_contiguous(), "operators take contiguous activations"
        assert outputs.is_contiguous(), "operators write contiguous activations"
        self.library.linear(
            inputs.data_ptr(), self._arguments, self.element_type, inputs.shape[0], outputs.data_ptr(), accumulate,
            self.threads,
        )  # fmt: skip


class CpuGatedLinear:
    """Gate and up product of a tile of tokens, joined before they leave the cache."""

    def __init__(
        self, library: CpuLibrary, gate: LaidOutMatrix, up: LaidOutMatrix, dtype: torch.dtype, activation: Activation,
        threads: int,
    ) -> None:  # fmt: skip
        """Multiply with `gate` and `up`, as `CpuLinear` does, on `threads` threads."""
        assert bool(gate.arguments.bits) == bool(up.arguments.bits), "gate and up are both packed, or neither is"
        self._library = library
        self.gate = gate
        self.up = up
        self.activation = ACTIVATIONS[activation]
        self._dtype = dtype
        self._element_type = ELEMENT_TYPES[dtype]
        self._threads = threads
        self._arguments = ctypes.pointer(gate.arguments), ctypes.pointer(up.arguments)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; see `Activation`."""
        assert inputs.is_contiguous(), "operators take contiguous activations"
        outputs = inputs.new_empty(inputs.shape[0], self.gate.arguments.outputs)
        self._library.gated_linear(
            inputs.data_ptr(), *self._arguments, self._element_type, inputs.shape[0], outputs.data_ptr(),
            self.activation, self._threads,
        )  # fmt: skip
        return outputs

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return both products; see `GatedLinear.halves`."""
        products = (CpuLinear(self._library, half, self._dtype, self._threads) for half in (self.gate, self.up))
        return torch.cat([product(inputs) for product in products], dim=1)


class CpuKernels:
    """Layer operations on CPUs."""

    activation_dtype = torch.float32

    def __init__(
        self, library: CpuLibrary, dtype: torch.dtype, threads: int, blocks: BlockFunctions | None = None
    ) -> None:
        """Hold weights as `dtype` and compute on `threads` threads, where `blocks` are given with oneDNN's products."""
        self._library = library
        self._blocks = blocks
        self._dtype = dtype
        self._threads = threads
        self._arena = HostArena()

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        """Lay out a matrix; a quantised one is widened."""
        match weight:
            case Fp8Matrix() | Int8Matrix():
                # The narrowest type that holds FP8 and INT8 values exactly; so do inputs that are rounded to it.
                values = self._lay_out(weight.values, None, torch.bfloat16)
                product = CpuLinear(self._library, values, torch.bfloat16, self._threads)
                return WidenedLinear(product, torch.float32, activation_quantiser(weight), weight.scales, bias)
            case Fp8BlockMatrix():
                return PreparedLinear(self._plain(weight.widened(torch.float32), bias), round_in_groups)
            case GroupedMatrix():
                product = CpuLinear(self._library, self._pack(weight, bias), self._dtype, self._threads)
                return PreparedLinear(product, weight.ordered_inputs) if weight.order is not None else product
            case _:
                return self._plain(weight, bias)

    def wide_linear(self, weight: torch.Tensor) -> Linear:
        """Lay out a matrix in float32."""
        laid_out = self._lay_out(weight, None, torch.float32)
        return CpuLinear(self._library, laid_out, torch.float32, self._threads)

    def gated_linear(
        self, gate: Matrix, up: Matrix, biases: tuple[torch.Tensor, torch.Tensor] | None, activation: Activation
    ) -> GatedLinear:
        """Lay out gate and up matrix."""
        gate_bias, up_bias = biases or (None, None)
        if isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor):
            first, second = self._lay_out(gate, gate_bias, self._dtype), self._lay_out(up, up_bias, self._dtype)
        elif isinstance(gate, GroupedMatrix) and isinstance(up, GroupedMatrix) and gate.order is None:
            assert up.order is None, "gate and up take their inputs in the same order"
            first, second = self._pack(gate, gate_bias), self._pack(up, up_bias)
        else:
            # Inputs are quantised or put in order once, and scales come before the activation.
            return TorchGatedLinear(self.linear(above(gate, up), torch.cat(biases) if biases else None), activation)
        return CpuGatedLinear(self._library, first, second, self._dtype, activation, self._threads)

    def experts(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, *, are_all: bool = True
    ) -> Experts:
        """Lay out each expert by itself."""
        del are_all  # the loop passes by experts elsewhere in any case
        return ExpertLoop(self, count, matrices, activation)

    def delta_net(self, constants: DeltaNetConstants) -> DeltaNet:
        return TorchDeltaNet(constants)

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
        return CpuLinear(self._library, self._lay_out(weight, bias, self._dtype), self._dtype, self._threads)

    def _lay_out(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> LaidOutMatrix:
        outputs, inputs = weight.shape
        panel, pair = self._library.panel, _INPUTS_PER_STEP[dtype]
        assert inputs % pair == 0, "no model has layers of odd width"
        panels, whole = -(-outputs // panel), outputs // panel
        packed = self._arena.zeros((panels, inputs // pair, panel, pair), dtype)
        rows = weight.reshape(outputs, inputs // pair, pair)
        packed[:whole] = rows[: whole * panel].view(whole, panel, inputs // pair, pair).transpose(1, 2)
        if whole < panels:
            packed[whole, :, : outputs - whole * panel] = rows[whole * panel :].transpose(0, 1)
        return self._laid_out(packed, None, bias, dtype, inputs=inputs, outputs=outputs)

    def _pack(self, matrix: GroupedMatrix, bias: torch.Tensor | None) -> LaidOutMatrix:
        """Lay out integers, which stay packed."""
        (outputs, inputs), bits = matrix.values.shape, matrix.bits
        assert inputs % _INTEGERS_PER_STEP == 0, "groups are as large, or larger"
        count, steps = -(-outputs // self._library.panel), inputs // _INTEGERS_PER_STEP
        panels = self._arena.zeros((count, steps, 2 * bits * self._library.panel), torch.uint8)
        values = matrix.values.contiguous()
        self._library.pack(values.data_ptr(), outputs, inputs, bits, panels.data_ptr(), self._threads)
        parts = [matrix.scales] if matrix.shifts is None else [matrix.scales, matrix.shifts]
        in_panels = [self._in_panels(each) for each in parts]
        scales = self._arena.zeros((*in_panels[0].shape[:2], len(parts), self._library.panel), matrix.scales.dtype)
        for i, each in enumerate(in_panels):
            scales[:, :, i] = each
        return self._laid_out(
            panels, scales, bias, self._dtype, inputs=inputs, outputs=outputs, bits=bits, group=matrix.group,
            has_wide_scales=matrix.scales.dtype == torch.float32, has_shifts=matrix.shifts is not None,
            is_e2m1=matrix.numbers is Numbers.E2M1,
        )  # fmt: skip

    def _in_panels(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [outputs, width], filled up with zeros, as [panels, width, panel]."""
        panel = self._library.panel
        padded = pad(rows, (0, 0, 0, -rows.shape[0] % panel))
        return padded.view(-1, panel, rows.shape[1]).transpose(1, 2)

    def _laid_out(
        self, panels: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype,
        **fields: int,
    ) -> LaidOutMatrix:  # fmt: skip
        wide = None if bias is None else bias.float().contiguous()
        # oneDNN was found to have products of this type only.
        blocks = self._blocks if dtype == self._dtype else None
        arguments = MatrixArguments(
            panels=panels.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if wide is None else wide.data_ptr(),
            blocks=None if blocks is None else ctypes.pointer(blocks),
            **fields,
        )
        return LaidOutMatrix(panels, scales, wide, arguments)
