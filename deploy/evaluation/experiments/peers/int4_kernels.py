"""Times of a layer's products with weights in 4 bits, with the engine's programs and with Marlin.

`python -m deploy.evaluation.experiments.peers.int4_kernels deploy/evaluation/shapes/llama-3.1-8b --peer DIRECTORY`

DIRECTORY contains the sources of gptqmodel, which has the Marlin of vLLM: its packages `gptqmodel` and `gptqmodel_ext`.
Its kernels of bfloat16 inputs in `gptqmodel_ext/marlin` are compiled for this GPU first, which takes nvcc, ninja and
minutes; without `--peer`, only the engine's are measured. Both run in this process, replayed as CUDA graphs, on the
same weights, which no cache holds, in groups of 128: `awq` with zero points and `gptq` without. Each is compared with
a float32 product of the dequantised weights first. `bfloat16` is torch's product of weights that are not quantised.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from deploy.evaluation.experiments.peers.kernel_times import Report, checked, copies_of, microseconds
from deploy.evaluation.experiments.quantization_speed import layers_of
from services.worker.engine.quantization.grouped import grouped_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deploy.evaluation.experiments.quantization_speed import Layer

    Multiply = Callable[[torch.Tensor], torch.Tensor]

GROUP, BITS = 128, 4
FORMATS = {"awq": True, "gptq": False}
NAMESPACE = "gptqmodel_marlin_bf16"


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix [out, in] in 4 bits: weight (i, j) is (values[i, j] - zero point) * scale of (i, j // GROUP)."""

    values: torch.Tensor  # [out, in] uint8
    scales: torch.Tensor  # [out, groups] bfloat16
    zero_points: torch.Tensor | None  # [out, groups] uint8; None: 8

    @classmethod
    def random(cls, layer: Layer, device: torch.device, seed: int, *, has_zero_points: bool) -> Weights:
        """Return random ones, of products as large as their inputs."""
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)

        groups = layer.inputs // GROUP
        scales = 1 + torch.rand(layer.outputs, groups, generator=generator, device=device)
        return cls(
            drawn(0, 16, layer.outputs, layer.inputs),
            (scales / (7 * layer.inputs**0.5)).bfloat16(),
            drawn(4, 12, layer.outputs, groups) if has_zero_points else None,
        )

    def widened(self) -> torch.Tensor:
        """Return the weights [out, in] float32."""
        outputs, groups = self.scales.shape
        zero_points = 8 if self.zero_points is None else self.zero_points.float()[:, :, None]
        values = self.values.float().view(outputs, groups, GROUP)
        return ((values - zero_points) * self.scales.float()[:, :, None]).view(outputs, -1)


def engine_product(weights: Weights) -> Multiply:
    """Return the product as the engine's layers compute it."""
    # Only here: Triton is needed.
    from services.worker.engine.kernels.gpu.kernels import GpuKernels

    matrix = grouped_matrix(weights.values, BITS, weights.scales, weights.zero_points, GROUP)
    return GpuKernels(torch.bfloat16, weights.values.device).linear(matrix, None)


class Marlin:
    """The peer's product."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        """Compile it.

        Raises:
            SystemExit: nothing can be imported from `directory`, or compiled.
        """
        sys.path.insert(0, str(directory.absolute()))
        try:
            self._layout = importlib.import_module("gptqmodel.utils.marlin")
            self._types = importlib.import_module("gptqmodel.utils.marlin_scalar_type").scalar_types
            self.label = f"gptqmodel {importlib.import_module('gptqmodel').__version__}"
        except (ImportError, AttributeError) as error:
            raise SystemExit(f"{directory}: cannot import gptqmodel's layout of weights from there: {error}") from error
        compile_kernels(directory / "gptqmodel_ext" / "marlin", device)
        self._operations = getattr(torch.ops, NAMESPACE)
        self._workspace = self._layout.marlin_make_workspace_new(device)
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)

    def product(self, weights: Weights) -> Multiply:
        """Return the product with weights in the peer's layout."""
        outputs, inputs = weights.values.shape
        groups = inputs // GROUP
        words = weights.values.t().contiguous().view(inputs // 8, 8, outputs).int()
        shifts = torch.arange(0, 32, BITS, device=words.device, dtype=torch.int32)
        packed = (words << shifts[None, :, None]).sum(1, dtype=torch.int32)
        matrix = self._operations.gptq_marlin_repack(packed, self._nothing, inputs, outputs, BITS)
        scales = self._layout.marlin_permute_scales(weights.scales.t().contiguous(), inputs, outputs, GROUP)
        zero_points, kind = self._nothing, self._types.uint4b8
        if weights.zero_points is not None:
            ordered = weights.zero_points.t().contiguous().int()
            zero_points = self._layout.marlin_zero_points(ordered, groups, outputs, BITS)
            kind = self._types.uint4

        def multiply(given: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self._operations.gptq_marlin_gemm_bf16(
                given, None, matrix, None, scales, None, zero_points, self._nothing, self._nothing, self._workspace,
                kind.id, given.shape[0], outputs, inputs, True, False, True, False,
            )  # fmt: skip
            return result

        return multiply


def compile_kernels(directory: Path, device: torch.device) -> None:
    """Compile the sources in `directory` for a GPU, and load their operations.

    Raises:
        SystemExit: there are none, or they cannot be compiled.
    """
    # Only here: it looks for the compiler.
    from torch.utils.cpp_extension import load

    names = ("marlin_torch_bf16.cpp", "gptq_marlin_bf16.cu", "gptq_marlin_repack.cu", "awq_marlin_repack.cu")
    kernels = sorted(directory.glob("kernel_bf16_*.cu"))
    if missing := [name for name in names if not (directory / name).is_file()] or ([] if kernels else ["kernels"]):
        raise SystemExit(f"{directory}: no {missing[0]} there")
    major, minor = torch.cuda.get_device_capability(device)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    began_at = time.monotonic()
    # As gptqmodel compiles them.
    conversions = [f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS")]
    optimised = ["-O3", "-Xptxas", "-O3,-dlcm=ca", "-static-global-template-stub=false", "-diag-suppress=179,39,177"]
    try:
        load(
            name=f"{NAMESPACE}_ops",
            sources=[str(directory / name) for name in names] + [str(kernel) for kernel in kernels],
            extra_include_paths=[str(directory), *library_headers()],
            extra_cflags=["-O3"],
            extra_cuda_cflags=[*conversions, *optimised],
            is_python_module=False,
            with_cuda=True,
        )
    except (ImportError, OSError, RuntimeError) as error:
        raise SystemExit(f"{directory}: cannot compile its kernels: {error}") from error
    print(f"compiled in {time.monotonic() - began_at:.0f} s", flush=True)  # noqa: T201


def library_headers() -> list[str]:
    """Return the directories of headers that NVIDIA's Python packages contain."""
    try:
        folders = importlib.import_module("nvidia").__path__
    except ImportError:
        return []
    return [str(path) for folder in folders for path in sorted(Path(folder).glob("*/include"))]


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and measure; print and write figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="directories with config.json")
    parser.add_argument("--peer", type=Path, help="directory with gptqmodel's sources")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256, 4096])
    parser.add_argument("--seconds", type=float, default=0.1, help="of replays of each figure (%(default)s)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    marlin = None if arguments.peer is None else Marlin(arguments.peer, device)
    with torch.inference_mode():
        for model in arguments.models:
            report = Report("int4_kernels", model.name, arguments.json)
            for layer in layers_of(model, 1):
                measure(layer, marlin, report, arguments, device)


def measure(
    layer: Layer, marlin: Marlin | None, report: Report, arguments: argparse.Namespace, device: torch.device
) -> None:
    """Report the times of a layer's product in all formats.

    Raises:
        SystemExit: an implementation's result is wrong.
    """
    copies = copies_of(layer.inputs * layer.outputs // 2)
    for name, has_zero_points in FORMATS.items():
        every = [Weights.random(layer, device, seed, has_zero_points=has_zero_points) for seed in range(copies)]
        ways = {"pando": [engine_product(weights) for weights in every]}
        if marlin is not None:
            ways[marlin.label] = [marlin.product(weights) for weights in every]
        reference = every[0].widened()
        _measure_ways(f"{name}, {layer.name} {layer.inputs} x {layer.outputs}", ways, reference, report, arguments)
    wide = [torch.randn(layer.outputs, layer.inputs, device=device).bfloat16() for _ in range(max(2, copies // 4))]
    ways = {"bfloat16": [partial(linear, weight=weight) for weight in wide]}
    title = f"bfloat16, {layer.name} {layer.inputs} x {layer.outputs}"
    _measure_ways(title, ways, wide[0].float(), report, arguments)


def _measure_ways(
    title: str, ways: dict[str, list[Any]], reference: torch.Tensor, report: Report, arguments: argparse.Namespace
) -> None:
    for rows in arguments.rows:
        inputs = torch.randn(rows, reference.shape[1], device=reference.device).bfloat16()
        expected = linear(inputs.float(), reference)
        for label, products in ways.items():
            metric = f"{title}, {rows} rows"
            report.add(
                label, f"{metric}: error", 100 * checked(f"{metric}: {label}", products[0](inputs), expected), "%"
            )
            calls = [partial(product, inputs) for product in products]
            report.add(label, metric, microseconds(calls, arguments.seconds), "us")


if __name__ == "__main__":
    main()
