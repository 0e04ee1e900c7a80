"""Products in FP8 by the device's matrix units; activations are scaled and rounded token by token ahead of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.gpu import elementwise, small_linear
from services.worker.engine.kernels.gpu.fp8_rows import quantise_rows

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import Linear, Norms
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.fp8 import Fp8Matrix


class Fp8Inputs:
    """The inputs of one product in FP8.

    The program that computes them, a norm or a gate, quantises them as well (`FollowsNorm`,
    `PrecedesProduct`). Others are quantised by a program of their own.
    """

    def __init__(self, scale: torch.Tensor | None) -> None:
        """Use `scale` [1] float32 for all tokens; None: each has its own."""
        self._scale = scale
        # The last inputs that were computed here, in FP8, and their scales.
        self._ready: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        normed, *rows = elementwise.rms_norm_in_fp8(inputs, None, weight, epsilon, self._scale)
        return self._keep(normed, *rows)

    def add_rms_norm(
        self, sums: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Do so with sums, as one program."""
        if not (sums.is_contiguous() and added.is_contiguous()):
            return self.rms_norm(sums.add_(added), weight, epsilon)
        normed, *rows = elementwise.rms_norm_in_fp8(sums, added, weight, epsilon, self._scale)
        return self._keep(normed, *rows)

    def gate(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the gated product; see `elementwise.gate`."""
        if self._scale is None and both.shape[1] // 2 > elementwise.WIDEST_GATED_ROW:
            return elementwise.gate(both, activation)
        gated, *rows = elementwise.gate_in_fp8(both, activation, self._scale)
        return self._keep(gated, *rows)

    def take(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `inputs` [tokens, in] in FP8 and their scales [tokens, 1] float32.

        Nothing may have written to `inputs` since they were returned by this object.
        """
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is inputs:
            return ready[1:]
        return quantise_rows(inputs, self._scale)

    def _keep(self, computed: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        self._ready = computed, values, scales
        return computed


class GpuFp8Linear:
    """One FP8 matrix; activations are bfloat16."""

    def __init__(self, matrix: Fp8Matrix, bias: torch.Tensor | None) -> None:
        """Keep the matrix [out, in] and bias [out]."""
        self._matrix = matrix
        self._bias = bias
        self.inputs = Fp8Inputs(matrix.input_scale)

    @property
    def norms(self) -> Norms:
        return self.inputs

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.inputs.take(inputs)
        if inputs.shape[0] > small_linear.MOST_TOKENS:
            product = multiply(rows, self._matrix, self._bias, inputs.dtype)
            return product if outputs is None else outputs.copy_(product)
        if outputs is None:
            outputs = inputs.new_empty(inputs.shape[0], self._matrix.shape[0])
        multiply_few(rows, self._matrix, self._bias, outputs)
        return outputs

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        if self.adds_within(inputs.shape[0]) and sums.is_contiguous():
            multiply_few(self.inputs.take(inputs), self._matrix, self._bias, sums, adds=True)
        else:
            sums += self(inputs)

    def adds_within(self, tokens: int) -> bool:
        return tokens <= small_linear.MOST_TOKENS


class GpuFp8GatedLinear:
    """Gate and up projection as one product."""

    def __init__(
        self, matrix: Fp8Matrix, bias: torch.Tensor | None, activation: Activation, following: Fp8Inputs | None = None
    ) -> None:
        """Keep the matrix [2 intermediate, in], gate above up, and bias [2 intermediate].

        `following` are the inputs of the product that takes the result, if it is in FP8.
        """
        self._matrix = matrix
        self._bias = bias
        self._activation = activation
        self._inputs = Fp8Inputs(matrix.input_scale)
        self._following = following

    @property
    def norms(self) -> Norms:
        return self._inputs

    def preceding(self, product: Linear) -> GpuFp8GatedLinear:
        """Return this product, with results quantised as the inputs of `product`, if that is in FP8."""
        following = product.inputs if isinstance(product, GpuFp8Linear) else None
        return GpuFp8GatedLinear(self._matrix, self._bias, self._activation, following)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; see `Activation`."""
        if inputs.shape[0] > small_linear.MOST_TOKENS:
            both = self.halves(inputs)
            gate = elementwise.gate if self._following is None else self._following.gate
            return gate(both, self._activation)
        outputs = inputs.new_empty(inputs.shape[0], self._matrix.shape[0] // 2)
        multiply_few(self._inputs.take(inputs), self._matrix, self._bias, outputs, activation=self._activation)
        return outputs

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return both products; see `GatedLinear.halves`."""
        return multiply(self._inputs.take(inputs), self._matrix, self._bias, inputs.dtype)


def multiply(
    rows: tuple[torch.Tensor, torch.Tensor], matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product [tokens, out] of `dtype` of rows, as `Fp8Inputs.take` returns them, plus bias [out]."""
    values, scales = rows
    # Sums stay in the matrix units, which keep some 14 bits of them; quantising inputs and weights keeps four.
    product: torch.Tensor = torch._scaled_mm(
        values, matrix.values.t(), scale_a=scales, scale_b=matrix.scales[None], bias=bias, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return product


def multiply_few(
    rows: tuple[torch.Tensor, torch.Tensor], matrix: Fp8Matrix, bias: torch.Tensor | None, outputs: torch.Tensor, *,
    adds: bool = False, activation: Activation | None = None,
) -> None:  # fmt: skip
    """Write the product of few rows to `outputs` [tokens, out], or add it; gated if there is an activation."""
    values, scales = rows
    if values.shape[0]:
        small_linear.launch(
            values, matrix.values, bias, outputs, small_linear.Scales(scales, matrix.scales), adds=adds,
            activation=activation,
        )  # fmt: skip
