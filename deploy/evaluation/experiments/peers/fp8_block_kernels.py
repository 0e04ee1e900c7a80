"""Times of a layer's products with FP8 in blocks of 128 x 128, with the engine's programs, FlashInfer's and cuBLAS's.

`python -m deploy.evaluation.experiments.peers.fp8_block_kernels deploy/evaluation/shapes/llama-3.1-8b`

On a Hopper GPU. FlashInfer's is its `fp8_blockscale_gemm_sm90`, DeepGEMM's kernels as TensorRT-LLM has them, which are
compiled at the first call of each shape; this takes nvcc and ninja. The engine calls these kernels, too, where they are
installed; `pando` are its other programs. cuBLAS's is `torch._scaled_mm`, with the engine's program that quantises
inputs; without FlashInfer the engine itself calls it for more than 64 rows. All are given inputs in bfloat16 and
quantise them, 128 at a time, within what is timed. They run in this process, replayed as CUDA graphs, on the same
weights, which no cache holds, after a comparison with a float32 product of inputs that are not quantised.
"""

from __future__ import annotations

import argparse
import importlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, pad

from deploy.evaluation.experiments.peers.kernel_times import Report, checked, copies_of, microseconds
from deploy.evaluation.experiments.quantization_speed import layers_of
from services.worker.engine.quantization.formats import FP8_BLOCK
from services.worker.engine.quantization.fp8 import quantise_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deploy.evaluation.experiments.quantization_speed import Layer
    from services.worker.engine.quantization.fp8 import Fp8BlockMatrix

    Multiply = Callable[[torch.Tensor], torch.Tensor]

ENGINE, PEER, LIBRARY = "pando", "flashinfer", "cublas"
# Of inputs that are rounded to three bits of mantissa.
LARGEST_ERROR = 0.05
HOPPER = (9, 0)
# The library multiplies multiples of so many rows.
LIBRARY_ROWS = 8


def engine_product(matrix: Fp8BlockMatrix) -> Multiply:
    """Return the product as the engine's layers compute it."""
    # Only here: Triton is needed.
    from services.worker.engine.kernels.gpu.kernels import GpuKernels

    return GpuKernels(torch.bfloat16, matrix.values.device).linear(matrix, None)


def library_product(matrix: Fp8BlockMatrix) -> Multiply:
    """Return cuBLAS's product, for any number of rows."""
    # Only here: Triton is needed.
    from services.worker.engine.kernels.gpu.quantised_linear import block_scales, library_scales, quantise_groups

    weight_scales = library_scales(matrix, block_scales(matrix))
    assert weight_scales is not None, "the matrix is of whole blocks"
    transposed = weight_scales.t()

    def multiply(inputs: torch.Tensor) -> torch.Tensor:
        missing = -inputs.shape[0] % LIBRARY_ROWS
        values, scales = quantise_groups(pad(inputs, (0, 0, 0, missing)) if missing else inputs)
        product: torch.Tensor = torch._scaled_mm(
            values, matrix.values.t(), scale_a=scales.t().contiguous().t(), scale_b=transposed, out_dtype=inputs.dtype
        )
        return product[: inputs.shape[0]]

    return multiply


def peer_product(matrix: Fp8BlockMatrix) -> Multiply:
    """Return FlashInfer's product.

    Raises:
        SystemExit: there is no FlashInfer that has it.
    """
    try:
        run = importlib.import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"FlashInfer has no product of FP8 in blocks: {error}") from error
    scales = matrix.scales[::FP8_BLOCK].contiguous()

    def multiply(inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = run(inputs, matrix.values, None, scales)
        return product

    return multiply


WAYS: dict[str, Callable[[Fp8BlockMatrix], Multiply]] = {
    ENGINE: engine_product,
    PEER: peer_product,
    LIBRARY: library_product,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and measure; print and write figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="directories with config.json")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="(all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 4096], help="(1 16 64 256 4096)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of replays of each figure (%(default)s)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        raise SystemExit("there is no Hopper GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        for model in arguments.models:
            report = Report("fp8_block_kernels", model.name, arguments.json)
            for layer in layers_of(model, 1):
                measure(layer, report, arguments, device)


def measure(layer: Layer, report: Report, arguments: argparse.Namespace, device: torch.device) -> None:
    """Report the times of a layer's product.

    Raises:
        SystemExit: an implementation's result is wrong, or it is missing.
    """
    matrices = []
    for _ in range(copies_of(layer.inputs * layer.outputs)):
        weight = torch.randn(layer.outputs, layer.inputs, device=device).mul_(layer.inputs**-0.5)
        matrices.append(quantise_blocks(weight))
    reference = matrices[0].widened(torch.float32)
    ways: dict[str, list[Multiply]] = {name: [WAYS[name](each) for each in matrices] for name in arguments.ways}
    for rows in arguments.rows:
        inputs = torch.randn(rows, layer.inputs, device=device).bfloat16()
        expected = linear(inputs.float(), reference)
        for label, products in ways.items():
            metric = f"{layer.name} {layer.inputs} x {layer.outputs}, {rows} rows"
            began_at = time.monotonic()
            error = checked(f"{metric}: {label}", products[0](inputs), expected, LARGEST_ERROR)
            report.add(label, f"{metric}: first call", time.monotonic() - began_at, "s")
            report.add(label, f"{metric}: error", 100 * error, "%")
            calls: list[Any] = [partial(product, inputs) for product in products]
            report.add(label, metric, microseconds(calls, arguments.seconds), "us")


if __name__ == "__main__":
    main()
