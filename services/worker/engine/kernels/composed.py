"""Operations composed of other kernels' products, for back ends without a program of their own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from services.worker.engine.quantization import fp8, int8
from services.worker.engine.quantization.formats import FP8_BLOCK
from services.worker.engine.quantization.int8 import Int8Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.worker.engine.kernels.interface import ExpertMatrices, Kernels, Linear
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.fp8 import Fp8Matrix

    Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class ExpertLoop:
    """Tokens are grouped by expert, so that each expert's weights are read once; see `Experts`.

    Experts run in the order of their numbers: a token's sum has the same bits in every batch.
    """

    def __init__(
        self, kernels: Kernels, count: int, matrices: Iterator[ExpertMatrices], activation: Activation
    ) -> None:
        """Lay out `count` experts with `kernels`."""
        self.experts = [
            (
                kernels.gated_linear(each.gate, each.up, each.gate_up_biases, activation),
                kernels.linear(each.down, each.down_bias),
            )
            for each in matrices
        ]
        assert len(self.experts) == count, "there are as many matrices as experts"

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum; on a GPU it waits for `expert_ids`."""
        outputs = torch.zeros_like(inputs)
        chosen = expert_ids.shape[1]
        expert_of, order = expert_ids.flatten().sort(stable=True)
        tokens, weights = order // chosen, routing_weights.flatten()[order, None]
        # Choices of experts on other ranks come last.
        counts = torch.bincount(expert_of, minlength=len(self.experts)).tolist()[: len(self.experts)]
        start = 0
        for (gate_up, down), count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(start, start + count)
                outputs.index_add_(0, tokens[part], down(gate_up(inputs[tokens[part]])) * weights[part])
                start += count
        return outputs


class WidenedLinear:
    """The product with a quantised matrix by a unit that multiplies a wider type, in which both sides are exact.

    What is multiplied and summed up is the same as where units take narrow types, but the matrix takes as much memory
    as a wider one.
    """

    def __init__(
        self, product: Linear, dtype: torch.dtype, quantise: Quantise, scales: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Scale what `product` returns for quantised values in `dtype` by `scales` [out] float32, and add `bias` [out].

        `quantise` returns values of inputs [tokens, in] and their scales [tokens, 1].
        """
        self._product = product
        self._dtype = dtype
        self._quantise = quantise
        self._scales = scales
        self._bias = None if bias is None else bias.to(scales.device, torch.float32)

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product, in the inputs' type."""
        values, scales = self._quantise(inputs)
        scaled = self._product(values.to(self._dtype)).float() * scales * self._scales
        product = (scaled if self._bias is None else scaled + self._bias).to(inputs.dtype)
        return product if outputs is None else outputs.copy_(product)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        sums += self(inputs)

    def adds_within(self, tokens: int) -> bool:
        del tokens
        return False


class PreparedLinear:
    """The product with a widened matrix of inputs that are changed beforehand: put in order, or quantised."""

    def __init__(self, product: Linear, prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Multiply with what `prepare` returns for inputs [tokens, in]."""
        self._product = product
        self._prepare = prepare

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product, in the inputs' type."""
        return self._product(self._prepare(inputs), outputs)

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        self._product.add_to(self._prepare(inputs), sums)

    def adds_within(self, tokens: int) -> bool:
        return self._product.adds_within(tokens)


def activation_quantiser(matrix: Fp8Matrix | Int8Matrix) -> Quantise:
    """Select the function that quantises the activations of a matrix."""
    if isinstance(matrix, Int8Matrix):
        return int8.quantise_rows
    if matrix.input_scale is None:
        return fp8.quantise_rows
    return partial(fp8.quantise_with, scale=matrix.input_scale)


def round_in_groups(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs [tokens, in] as FP8 with a scale for each 128 of them has them, filled up with zeros."""
    values, scales = fp8.quantise_groups(inputs)
    groups = values.view(*scales.shape, FP8_BLOCK).float() * scales[:, :, None]
    return groups.to(inputs.dtype).flatten(1)
